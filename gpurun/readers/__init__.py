"""Contains modules that read a run's folder and produce something from it."""
