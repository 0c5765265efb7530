"""Implements the command line: parses the arguments, calls a command, and renders its Result."""
