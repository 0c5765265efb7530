"""Turns events and records into text for users. Nothing in this package makes a decision."""
