"""The steps of a run, one module each. Only the driver decides their order, and no step imports another step."""
