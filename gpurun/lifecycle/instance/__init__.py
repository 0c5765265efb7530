"""Check, monitor and end one instance: its owner, its properties, and extra instances."""
