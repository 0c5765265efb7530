"""What earlier runs of this home give to a new one: a checkpoint to go on from, a warm compile cache."""
