"""Which documents are held out: it depends on their text alone, so that equal documents stay together."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from gpurun.core.errors import UsageError

EVERY = 1 << 64
"""The number of keys: one more than the highest key."""
_ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())


def hash_text(text: str) -> int:
    """Return 64 bits of the sha256 of a text without white space, accents composed (NFC): 0 to EVERY - 1."""
    if text.isascii():  # The same result, ten times as fast.
        letters = text.encode().translate(None, _ASCII_SPACE)
    else:
        letters = "".join(unicodedata.normalize("NFC", text).split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(letters).digest()[:8], "big")


def bound_for(fraction: float) -> int:
    """Return the bound below which keys are held out: for many documents, about this fraction of them."""
    return int(fraction * EVERY)


def bound_for_few(documents: Iterable[tuple[int, int]], fraction: float, source: str, *, once: bool = False) -> int:
    """Return the bound for a known list of documents, (key, bytes) each: at least one on each side.

    The held-out bytes come as near to the fraction as the documents allow; equal documents count `once` if
    duplicates are dropped. UsageError if all are equal.
    """
    sizes: dict[int, int] = {}
    for key, size in documents:
        sizes[key] = size if once else sizes.get(key, 0) + size
    if len(sizes) < 2:
        raise UsageError(
            "data.one_document",
            f"{source} is one document, or copies of one: nothing can be held out of it.",
            hint="Use more text, or put a line <|endoftext|> between its documents.",
        )
    target, keys = fraction * sum(sizes.values()), sorted(sizes)
    best = min(range(1, len(keys)), key=_misses(sizes, keys, target).__getitem__)
    return keys[best]


def _misses(sizes: dict[int, int], keys: list[int], target: float) -> list[float]:
    """Return, for every n, by how many bytes the fraction is missed if the first n keys are held out; never n = 0."""
    held, misses = 0, [float("inf")]
    for key in keys:
        held += sizes[key]
        misses.append(abs(held - target))
    return misses
