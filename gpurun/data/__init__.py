"""Provides a run's data: turns text into shards on this computer, or checks shards that the user provides."""
