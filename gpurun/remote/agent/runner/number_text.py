"""Numbers in the form that a trial of a sweep gets them."""

from __future__ import annotations


def text_of(value: float) -> str:
    """Return a number as a trial gets it: one that is not an integer has four digits."""
    return str(value) if isinstance(value, int) else "%.4g" % value


def number_of(text: str) -> float:
    """Return the number in such a text."""
    return int(text) if text.lstrip("-").isdigit() else float(text)
