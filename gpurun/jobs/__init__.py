"""What runs: each kind of job is a module here, and what it alone needs to know lies in a folder beside it."""
