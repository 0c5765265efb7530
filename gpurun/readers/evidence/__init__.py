"""Portable evidence: a run's card in one file, and a class's roster to check such files against."""
