"""The steps of a run, one file each; the driver alone orders them, and no step imports another."""
