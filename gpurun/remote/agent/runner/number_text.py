"""The text form of the numbers that a trial of a sweep gets."""

from __future__ import annotations


def text_of(value: float) -> str:
    """Return the text of a number for a trial. A number that is not an integer has four significant digits."""
    return str(value) if isinstance(value, int) else "%.4g" % value


def number_of(text: str) -> float:
    """Return the number in such a text."""
    return int(text) if text.lstrip("-").isdigit() else float(text)
