"""Runs a user's command on the machine as if it were the trainer: it writes the same files and events.

Standard library only, Python 3.8: it is uploaded with the command, and started by whatever Python is there.
"""
