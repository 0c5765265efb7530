"""The data of a run: text that is turned into shards here, or shards that the user provides."""
