"""Which documents are held out: a matter of their text alone, so that equal ones never part."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from gpurun.core.errors import UsageError

EVERY = 1 << 64
"""One more than the highest key."""
_ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())


def hash_text(text: str) -> int:
    """64 bits of the sha256 of a text without white space, accents composed (NFC): 0 to EVERY - 1."""
    if text.isascii():  # The same, ten times as fast.
        letters = text.encode().translate(None, _ASCII_SPACE)
    else:
        letters = "".join(unicodedata.normalize("NFC", text).split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(letters).digest()[:8], "big")


def bound_for(fraction: float) -> int:
    """Documents whose key is below it are held out: of many, about this fraction."""
    return int(fraction * EVERY)


def bound_for_few(documents: Iterable[tuple[int, int]], fraction: float, source: str, *, once: bool = False) -> int:
    """The bound for documents that are all known, (key, bytes) each: at least one is held out, and one trained on.

    The bytes that are held out come as near to the fraction as the documents let them; equal ones count `once` where
    duplicates are left out. UsageError where all are equal.
    """
    sizes: dict[int, int] = {}
    for key, size in documents:
        sizes[key] = size if once else sizes.get(key, 0) + size
    if len(sizes) < 2:
        raise UsageError(
            "data.one_document",
            f"{source} is one document, or the same one again and again: nothing can be held out of it.",
            hint="Take more text, or put a line <|endoftext|> between its documents.",
        )
    wanted, keys = fraction * sum(sizes.values()), sorted(sizes)
    best = min(range(1, len(keys)), key=_misses(sizes, keys, wanted).__getitem__)
    return keys[best]


def _misses(sizes: dict[int, int], keys: list[int], wanted: float) -> list[float]:
    """By how many bytes it is missed if the first n keys are held out, for every n; none is never taken."""
    held, misses = 0, [float("inf")]
    for key in keys:
        held += sizes[key]
        misses.append(abs(held - wanted))
    return misses
