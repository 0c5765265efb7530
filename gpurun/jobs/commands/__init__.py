"""What a command of the user's own needs to be planned: what it reads, and what is uploaded for it."""
