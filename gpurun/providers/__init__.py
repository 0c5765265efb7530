"""The clouds, and what is treated like one: six verbs each, one file each, one registry line each."""
