"""What runs a command of the user's own on the machine as if it were the trainer: it speaks the trainer's language.

Standard library only, Python 3.8: it is uploaded beside the command, and started by whatever Python is there.
"""
