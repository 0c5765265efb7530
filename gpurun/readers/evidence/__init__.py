"""Makes and checks evidence cards, each of which has a run's evidence in one file."""
