"""One file per verb. Each imports the rooms that it needs only when it is run, so that help stays instant."""
