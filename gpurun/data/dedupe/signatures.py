"""Writes and reads the file with a task's fingerprints; it is read by column or by document.

The file begins with a header of 1,024 bytes: one line of JSON, padded with spaces. Blocks of BLOCK documents follow,
the last of which may be shorter. A block has its keys column by column (uint64), then its signatures document by
document (uint32). A column is therefore read in long pieces, and a signature in one read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from gpurun.core.errors import UsageError
from gpurun.data.dedupe.fingerprint import PERMUTATIONS, band_keys, signature, text_key, url_key
from gpurun.data.source_file import Document

__all__ = ["KINDS", "Dedupe", "SignatureFile", "SignatureWriter", "signature_path"]

KINDS = ("url", "exact", "near")
"""The kinds of duplicates, in the order in which they are searched for."""
BLOCK = 4096
_HEADER_BYTES = 1024
_LEAST_FOUND = 0.85


@dataclass(frozen=True)
class Dedupe:
    """The kinds of duplicates; `threshold` is the Jaccard similarity of runs of five words, for near duplicates.

    If one word in twenty differs, the similarity is still 0.63.
    """

    kinds: tuple[str, ...] = KINDS
    threshold: float = 0.5

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise UsageError(
                "dedupe.kind",
                f"--dedupe {','.join(self.kinds)!r} is not a list of kinds of duplicates.",
                hint=f"Use one or more of: {', '.join(KINDS)}.",
            )
        if not 0.3 <= self.threshold <= 1.0:
            raise UsageError(
                "dedupe.threshold",
                f"A similarity of {self.threshold} is not between 0.3 and 1.",
                hint="0.5 finds texts that differ in up to one word in twenty, 0.8 in up to one word in fifty.",
            )

    def __str__(self) -> str:
        near = f"@{self.threshold}" if "near" in self.kinds else ""
        return ",".join(kind + (near if kind == "near" else "") for kind in KINDS if kind in self.kinds)

    @property
    def bands(self) -> tuple[int, int]:
        """Return (bands, rows), with as many rows as possible such that 85 % of pairs at the threshold share a band.

        A pair of similarity s shares a band with probability 1 - (1 - s^rows)^bands (Leskovec, Rajaraman, Ullman,
        Mining of Massive Datasets, 3.4).
        """
        rows = 2
        while 1 - (1 - self.threshold ** (rows + 1)) ** (PERMUTATIONS // (rows + 1)) >= _LEAST_FOUND and rows < 16:
            rows += 1
        return PERMUTATIONS // rows, rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the kind of duplicate that each column of keys finds."""
        counts = {"url": 1, "exact": 1, "near": self.bands[0]}
        return tuple(kind for kind in KINDS if kind in self.kinds for _ in range(counts[kind]))

    @property
    def signature_bytes(self) -> int:
        """Return the size in bytes of a document's signature."""
        return 4 * PERMUTATIONS if "near" in self.kinds else 0

    @property
    def bytes_per_document(self) -> int:
        """Return the bytes of disk that the search needs per document."""
        return 8 * len(self.columns) + self.signature_bytes


def dedupe_of(kinds: str, similarity: float | None) -> Dedupe | None:
    """Return the settings in `--dedupe` and `--similarity`; None for "none"."""
    if kinds == "none":
        return None
    return Dedupe(tuple(kinds.split(",")), Dedupe.threshold if similarity is None else similarity)


def signature_path(folder: Path, index: int) -> Path:
    """Return the file with the fingerprints of a task."""
    return folder / f"signatures-{index:06d}.bin"


class SignatureWriter:
    """Writes the fingerprints of a task's documents in order; the file appears complete or not at all."""

    def __init__(self, folder: Path, index: int, dedupe: Dedupe, identity: str) -> None:
        self._path, self._dedupe, self._identity = signature_path(folder, index), dedupe, identity
        self._unfinished = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        self._file = open(self._unfinished, "wb")  # noqa: SIM115  closed by __exit__
        self._file.write(bytes(_HEADER_BYTES))
        self._digest = hashlib.sha256()
        self._keys: list[list[int]] = []
        self._signatures: list[np.ndarray] = []
        self.documents = 0

    def __enter__(self) -> SignatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._unfinished.unlink(missing_ok=True)

    def add(self, document: Document) -> None:
        """Add the next document."""
        kinds = self._dedupe.kinds
        self._keys.append([url_key(document.url)] * ("url" in kinds) + [text_key(document.text)] * ("exact" in kinds))
        if "near" in kinds:
            self._signatures.append(signature(document.text))
        if len(self._keys) == BLOCK:
            self._flush()

    def add_block(self, keys: np.ndarray, rows: np.ndarray | None) -> None:
        """Add a block: the keys of addresses and texts (n, 0 to 2) and the signatures; keys of bands are computed here.

        Each block has BLOCK documents; only the last may be shorter, because readers compute offsets from BLOCK.
        """
        parts = [keys.astype("<u8", copy=False).T]
        if rows is not None:
            parts += [band_keys(rows, *self._dedupe.bands).astype("<u8", copy=False), rows.astype("<u4", copy=False)]
        for part in parts:
            raw = np.ascontiguousarray(part).tobytes()
            self._digest.update(raw)
            self._file.write(raw)
        self.documents += len(keys)

    def _flush(self) -> None:
        """Write the documents that were added since the last block as one block."""
        if self._keys:
            keys = np.array(self._keys, dtype=np.uint64)
            self.add_block(keys, np.stack(self._signatures) if self._signatures else None)
        self._keys, self._signatures = [], []

    def _finish(self) -> None:
        self._flush()
        record = {"v": 1, "documents": self.documents, "identity": self._identity, "sha256": self._digest.hexdigest()}
        self._file.seek(0)
        self._file.write(json.dumps(record).encode("utf-8").ljust(_HEADER_BYTES))
        self._file.flush()
        os.rename(self._unfinished, self._path)


class SignatureFile:
    """A finished file; it is open only while it is read, because there may be thousands of them."""

    def __init__(self, path: Path, dedupe: Dedupe) -> None:
        """Raise OSError, or ValueError if the header is invalid."""
        self._path, self._dedupe = path, dedupe
        with open(path, "rb") as file:
            self.record = json.loads(file.read(_HEADER_BYTES))
        self.documents = int(self.record["documents"])

    def is_sound(self, identity: str) -> bool:
        """Return whether the file was made with this identity, and its content matches the digest in its header."""
        digest = hashlib.sha256()
        with open(self._path, "rb") as file:
            file.seek(_HEADER_BYTES)
            while raw := file.read(1 << 20):
                digest.update(raw)
        return bool(self.record["identity"] == identity and self.record["sha256"] == digest.hexdigest())

    def column(self, number: int) -> Iterator[np.ndarray]:
        """Yield one column of keys in the order of documents, some thousands at a time."""
        with open(self._path, "rb", buffering=0) as file:
            for first in range(0, self.documents, BLOCK):
                length = min(BLOCK, self.documents - first)
                place = _HEADER_BYTES + first * self._dedupe.bytes_per_document + 8 * number * length
                yield np.frombuffer(os.pread(file.fileno(), 8 * length, place), dtype="<u8")

    def signatures(self, ordinals: np.ndarray) -> np.ndarray:
        """Return the signatures of some documents, uint32 (documents, PERMUTATIONS)."""
        size, before = self._dedupe.signature_bytes, 8 * len(self._dedupe.columns)
        rows = bytearray()
        with open(self._path, "rb", buffering=0) as file:
            for ordinal in ordinals.tolist():
                first = ordinal - ordinal % BLOCK
                length = min(BLOCK, self.documents - first)
                place = _HEADER_BYTES + first * self._dedupe.bytes_per_document + before * length
                rows += os.pread(file.fileno(), size, place + (ordinal - first) * size)
        return np.frombuffer(rows, dtype="<u4").reshape(len(ordinals), PERMUTATIONS)
