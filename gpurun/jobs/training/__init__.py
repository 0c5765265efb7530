"""What the trainer needs to be planned: its recipe, memory, speed, and weights to begin with."""
