"""A run from request to receipt: the steps, the driver that orders them, and the process that owns a run."""
