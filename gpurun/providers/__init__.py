"""Provides the clouds, and other places that are used like a cloud: each has six verbs, a file and a registry line."""
