"""What goes by way of a bucket: shards to the machine, checkpoints from it."""
