"""Numbers as a trial of a sweep is given them."""

from __future__ import annotations


def text_of(value: float) -> str:
    """A number as a trial is given it: of one that is not whole four digits."""
    return str(value) if isinstance(value, int) else "%.4g" % value


def number_of(text: str) -> float:
    """The number of such a text."""
    return int(text) if text.lstrip("-").isdigit() else float(text)
