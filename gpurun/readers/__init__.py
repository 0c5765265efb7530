"""Modules that read a run's folder and produce something from it; no lower room imports them."""
