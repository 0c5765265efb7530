"""Computes the fingerprints by which documents are compared: the address, the exact text, and a MinHash signature.

Addresses and texts are compared by 64 bits of their sha256: among 100 million documents the chance of a false match is
1 in 3,700. Near duplicates are found by datasketch's MinHash over all runs of five words.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import numpy as np

from gpurun.core.errors import SetupError
from gpurun.core.installed_files import install_line
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data.split import hash_text

__all__ = ["NO_KEY", "PERMUTATIONS", "band_keys", "normalised_url", "signature", "similarity", "text_key", "url_key"]

NO_KEY = 0
"""The key of a document that has no address or no words; such a document is never a duplicate."""
PERMUTATIONS = 128
RUN_WORDS = 5
_BATCH = 4096
"""The most runs of words that are hashed together: 2 MB of hash values."""
_ODD = np.uint64(0x9E3779B97F4A7C15)

# Chinese and Japanese have no spaces between words, and Korean words are inflected: each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")
_TRACKING = re.compile(r"utm_.*|fbclid|gclid|msclkid|mc_[ce]id", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


def normalised_url(url: str) -> str:
    """Return an address without the parts that do not change the page.

    These are the scheme, www, the default port, the fragment, tracking parameters, and a slash at the end.
    """
    url = url.strip()
    try:
        parts = urlsplit(url if _SCHEME.match(url) else f"//{url}")
        host, port = (parts.hostname or "").removeprefix("www."), parts.port
    except ValueError:
        return url  # An address that cannot be parsed is compared as it is.
    port_text = "" if port in (None, _PORTS.get(parts.scheme or "http")) else f":{port}"
    path = quote(parts.path, safe="%/:@!$&'()*+,;=~").rstrip("/")
    pairs = (pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not _TRACKING.fullmatch(pair[0]))
    query = urlencode(sorted(pairs))
    return f"{host}{port_text}{path}" + (f"?{query}" if query else "")


def url_key(url: str) -> int:
    """Return 64 bits that identify an address; NO_KEY if there is none."""
    address = normalised_url(url)
    return int.from_bytes(hashlib.sha256(_encode_text(address)).digest()[:8], "little") or 1 if address else NO_KEY


def text_key(text: str) -> int:
    """Return 64 bits that identify a text, ignoring white space and the encoding of accents; NO_KEY if it is empty."""
    return NO_KEY if text.isspace() or not text else hash_text(text) or 1


def signature(text: str) -> np.ndarray:
    """Return the MinHash signature of the text's runs of five words, ignoring case: PERMUTATIONS uint32.

    A text with fewer words is one run; a text without words has the signature of the empty set.
    """
    minhash, before = _empty_minhash().copy(), list[str]()
    for piece in tokenizers.cut_for_encoding(text):
        words = before + _WORD.findall(piece.casefold())
        runs = map(" ".join, zip(*(words[i:] for i in range(RUN_WORDS)), strict=False))
        while batch := {_encode_text(run) for run in islice(runs, _BATCH)}:
            minhash.update_batch(batch)
        before = words if len(words) < RUN_WORDS else words[1 - RUN_WORDS :]
    if 0 < len(before) < RUN_WORDS and minhash.is_empty():
        minhash.update(_encode_text(" ".join(before)))
    return np.asarray(minhash.hashvalues, dtype=np.uint32)


def similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the Jaccard similarities of rows of signatures: the shares of equal hash values (n,)."""
    return np.asarray((left == right).mean(axis=1))


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Return the keys of each band of `rows` hash values, uint64 (bands, documents); NO_KEY for empty signatures.

    Documents with equal keys in one band are candidates; unequal bands share a key once in 2^64.
    """
    keys = np.zeros((bands, len(signatures)), dtype=np.uint64)
    split = signatures[:, : bands * rows].reshape(len(signatures), bands, rows)
    for row in range(rows):
        keys = (keys ^ (keys >> np.uint64(29))) * _ODD + split[:, :, row].T.astype(np.uint64)
    keys[keys == NO_KEY] = 1
    keys[:, (signatures == np.uint32(0xFFFFFFFF)).all(axis=1)] = NO_KEY
    return keys


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@cache
def _empty_minhash() -> Any:
    """Return datasketch's MinHash of the empty set; its permutations are drawn from a fixed seed."""
    return _datasketch().MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32")


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise SetupError(
            "dedupe.not_installed",
            "Finding near duplicates needs datasketch.",
            hint=f"{install_line('data')}; or compare only addresses and texts: --dedupe url,exact.",
        ) from None
    return datasketch
