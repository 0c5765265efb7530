"""The steps of a run, a file each; only the driver orders them, and none imports another."""
