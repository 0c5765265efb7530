"""The clouds, and what is treated like one: each has six verbs, one file and one line in the registry."""
