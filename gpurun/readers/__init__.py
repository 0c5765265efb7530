"""What reads a run's folder and makes something of it; nothing below imports it."""
