"""Makes and checks evidence cards: a run's evidence in one file, which can be checked against a class's roster."""
