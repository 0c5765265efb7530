"""Modules that read a run's folder and make something from it."""
