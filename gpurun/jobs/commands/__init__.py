"""Plans a run of the user's own command: finds the files that the command reads, and decides which files to upload."""
