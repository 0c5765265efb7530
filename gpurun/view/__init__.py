"""Turns events and records into text for people; nothing in this package makes a decision."""
