"""The command line: parse, call, and hand a Result to the one place that renders it."""
