"""The lowest floor: errors, records, money, time, paths, settings and secrets. It imports no other room."""
