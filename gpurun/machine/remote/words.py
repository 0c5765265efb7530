"""Words that came from the far side, or through a library from it, as part of one of our sentences."""

from __future__ import annotations

_MOST_LETTERS = 300


def harmless(said: str | bytes) -> str:
    """The end of what was said, on one line and without anything that a terminal would obey; empty stays empty."""
    text = said[-4 * _MOST_LETTERS :].decode("utf-8", "replace") if isinstance(said, bytes) else said
    plain = "".join(letter if letter.isprintable() else " " for letter in text[-_MOST_LETTERS:])
    return " ".join(plain.split()).rstrip(".")


def words_of(error: BaseException) -> str:
    """An error's own words, else its name."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return harmless(text) or type(error).__name__
