"""Evidence that travels: a run's card in one file, and a class's roster that such files are held against."""
