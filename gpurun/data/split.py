"""Decides which documents are held out, from their text only, so that identical documents stay together."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from gpurun.core.errors import UsageError

EVERY = 1 << 64
"""The number of keys: one more than the highest key."""
_ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())


def hash_text(text: str) -> int:
    """Return 64 bits, 0 to EVERY - 1, of a text's sha256, after removing white space and composing accents (NFC)."""
    if text.isascii():  # This gives the same result, ten times as fast.
        letters = text.encode().translate(None, _ASCII_SPACE)
    else:
        letters = "".join(unicodedata.normalize("NFC", text).split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(letters).digest()[:8], "big")


def bound_for(fraction: float) -> int:
    """Return the bound below which a key's document is held out: over many documents, about this fraction of them."""
    return int(fraction * EVERY)


def bound_for_few(documents: Iterable[tuple[int, int]], fraction: float, source: str, *, once: bool = False) -> int:
    """Return the bound for a list of documents, each as (key, bytes), such that some are held out, but not all.

    The held-out bytes are as close to the fraction as possible. With `once`, identical documents count once, because
    duplicates are dropped. UsageError if all documents are identical.
    """
    sizes: dict[int, int] = {}
    for key, size in documents:
        sizes[key] = size if once else sizes.get(key, 0) + size
    if len(sizes) < 2:
        raise UsageError(
            "data.one_document",
            f"{source} is one document, or copies of one document, so no document can be held out.",
            hint="Use more text, or put a line <|endoftext|> between its documents.",
        )
    target, keys = fraction * sum(sizes.values()), sorted(sizes)
    best = min(range(1, len(keys)), key=_compute_misses(sizes, keys, target).__getitem__)
    return keys[best]


def _compute_misses(sizes: dict[int, int], keys: list[int], target: float) -> list[float]:
    """Return for each n by how many bytes the first n keys miss the target; infinity for n = 0."""
    held, misses = 0, [float("inf")]
    for key in keys:
        held += sizes[key]
        misses.append(abs(held - target))
    return misses
