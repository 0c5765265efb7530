"""Events in, text out: all text for people is drawn here, and nothing here makes decisions."""
