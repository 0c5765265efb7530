"""Events in, text out: everything that a person reads is drawn here, and nothing here decides anything."""
