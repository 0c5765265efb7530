"""What is compared of a document: its address, its text to the letter, and the words that it shares with others.

Addresses and texts are compared by 64 bits of their sha256: among 100 million documents a false match has a chance of
1 in 3,700. Near duplicates are found by datasketch's MinHash over all runs of five words.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import numpy as np

from trainer.prepare.corpus import pieces
from trainer.prepare.errors import Refusal

__all__ = ["NO_KEY", "PERMUTATIONS", "Fingerprint", "band_keys", "normalised_url", "similarity", "url_key"]

NO_KEY = 0
"""Of a document without an address, without a letter, or without a word: it is nobody's duplicate."""
PERMUTATIONS = 128
RUN_WORDS = 5
_BATCH = 4096
"""Runs of words hashed at once: 2 MB of hash values."""
_ODD = np.uint64(0x9E3779B97F4A7C15)

# Chinese and Japanese have no spaces between words, and Korean's words bend: there a word is a character.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")
_TRACKING = re.compile(r"utm_.*|fbclid|gclid|msclkid|mc_[ce]id", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


def normalised_url(url: str) -> str:
    """An address without what does not change the page: scheme, www, standard port, fragment, tracking, last slash."""
    url = url.strip()
    try:
        parts = urlsplit(url if _SCHEME.match(url) else f"//{url}")
        host, port = (parts.hostname or "").removeprefix("www."), parts.port
    except ValueError:
        return url  # No address that can be taken apart: equal only to itself.
    port_text = "" if port in (None, _PORTS.get(parts.scheme or "http")) else f":{port}"
    path = quote(parts.path, safe="%/:@!$&'()*+,;=~").rstrip("/")
    pairs = (pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not _TRACKING.fullmatch(pair[0]))
    query = urlencode(sorted(pairs))
    return f"{host}{port_text}{path}" + (f"?{query}" if query else "")


def url_key(url: str) -> int:
    """64 bits that name an address; NO_KEY where there is none."""
    address = normalised_url(url)
    return _key(hashlib.sha256(_bytes(address))) if address else NO_KEY


class Fingerprint:
    """What a document is compared by, taken as its text comes, piece by piece."""

    def __init__(self, *, near: bool = True) -> None:
        """Without `near` there is no signature."""
        self._digest, self._blank, self._apart = hashlib.sha256(), True, False
        self._minhash = _empty_minhash().copy() if near else None
        self._before: list[str] = []
        self._short = True

    def feed(self, text: str) -> None:
        """Take the next part of the document."""
        for piece in pieces(text):
            self._take_letters(piece)
            if self._minhash is not None:
                self._take_words(piece)

    @property
    def text_key(self) -> int:
        """64 bits that name the text up to its white space and the spelling of its accents (NFC)."""
        return NO_KEY if self._blank else _key(self._digest)

    @property
    def signature(self) -> np.ndarray:
        """The MinHash signature of the text's runs of five words, case ignored: PERMUTATIONS uint32.

        A text of fewer words is one run; the signature of one without any word is that of the empty set.
        """
        assert self._minhash is not None
        if self._short and self._before:
            self._minhash.update(_bytes(" ".join(self._before)))
        return np.asarray(self._minhash.hashvalues, dtype=np.uint32)

    def _take_letters(self, piece: str) -> None:
        squeezed = " ".join(piece.split())
        if squeezed:
            apart = self._apart or piece[0].isspace()
            self._digest.update(b" " if apart and not self._blank else b"")
            self._digest.update(_bytes(unicodedata.normalize("NFC", squeezed)))
            self._blank = False
        self._apart = piece[-1:].isspace() or (self._apart and not piece)

    def _take_words(self, piece: str) -> None:
        words = self._before + _WORD.findall(piece.casefold())
        runs = map(" ".join, zip(*(words[i:] for i in range(RUN_WORDS)), strict=False))
        while batch := {_bytes(run) for run in islice(runs, _BATCH)}:
            self._minhash.update_batch(batch)
        self._short = self._short and len(words) < RUN_WORDS
        self._before = words if self._short else words[1 - RUN_WORDS :]


def similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The Jaccard similarities that rows of signatures tell: the shares of equal hash values (n,)."""
    return (left == right).mean(axis=1)


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """The keys of each band of `rows` hash values, uint64 (bands, documents); NO_KEY for signatures of nothing.

    Documents whose keys are equal in one band are candidates; unequal bands share a key once in 2^64.
    """
    keys = np.zeros((bands, len(signatures)), dtype=np.uint64)
    split = signatures[:, : bands * rows].reshape(len(signatures), bands, rows)
    for row in range(rows):
        keys = (keys ^ (keys >> np.uint64(29))) * _ODD + split[:, :, row].T.astype(np.uint64)
    keys[keys == NO_KEY] = 1
    keys[:, (signatures == np.uint32(0xFFFFFFFF)).all(axis=1)] = NO_KEY
    return keys


def _key(digest: Any) -> int:
    return int.from_bytes(digest.digest()[:8], "little") or 1


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@cache
def _empty_minhash() -> Any:
    """datasketch's MinHash with nothing in it; its permutations are drawn from a fixed seed."""
    return _datasketch().MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32")


def _datasketch() -> ModuleType:
    try:
        import datasketch
    except ImportError:
        raise Refusal(
            "dedupe.not_installed",
            "Finding near duplicates needs datasketch.",
            hint="From the clone: pip install '.[data]'; or compare only addresses and texts: --dedupe url,exact.",
        ) from None
    return datasketch
