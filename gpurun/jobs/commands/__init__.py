"""Plans a run of the user's own command: finds the files that it reads, and decides which files are uploaded."""
