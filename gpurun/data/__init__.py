"""The data of a run: text made into shards here, or shards that a person brings."""
