"""Runs a user's command on the machine as if it were the trainer: it writes the same files and events.

It uses only the standard library and runs on Python 3.8, because it is uploaded with the command and started by any
Python that the machine has.
"""
