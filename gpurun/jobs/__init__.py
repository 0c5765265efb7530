"""Defines the kinds of job, one module for each. Code that only one kind needs is in a subfolder."""
