"""Signs each task's documents, searches all of them for duplicates, and filters a task's documents.

Signing a task writes `signatures-INDEX.bin`. The search writes `dropped-INDEX.bin` for each task (the positions of its
dropped documents, ascending uint32), and finally `duplicates.json`; then the signatures are removed. Any process may
sign a task, because the same texts give the same files.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from gpurun.core.errors import SetupError
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.untrusted import read_object
from gpurun.data.dedupe.search import search
from gpurun.data.dedupe.signatures import Dedupe, SignatureFile, SignatureWriter, signature_path
from gpurun.data.layout import Layout
from gpurun.data.source_file import Document
from gpurun.data.tasks import Drop, Tell

_DOCUMENT_BYTES = 2000
"""The assumed size of a document in the check of disk space; most web documents are larger."""


@dataclass(frozen=True)
class FingerprintWriter:
    """The work of signing: writes the fingerprints of a task's documents to a folder."""

    folder: Path
    dedupe: Dedupe
    identity: str
    layout: Layout

    def do(self, index: int, documents: Iterable[Document], tell: Tell) -> None:
        """Write the fingerprints of a task's documents."""
        with SignatureWriter(self.folder, index, self.dedupe, self.identity) as writer:
            for document in documents:
                writer.add(document)
                tell(len(document.text))

    def is_done(self, index: int) -> bool:
        """Return whether a task was signed with this identity, and the file is intact."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return SignatureFile(signature_path(self.folder, index), self.dedupe).is_sound(self.identity)
        return False


def find_duplicates(
    folder: Path, tasks: int, dedupe: Dedupe, *, identity: str, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Search all tasks' fingerprints, write which documents are to be dropped, and return the record of the search.

    The record: {"v": 1, "identity", "kinds", "threshold", "documents", "dropped": {kind: documents}, "tasks": [{"name",
    "documents", "sha256"}]}. OSError or ValueError if signatures are missing or damaged.
    """
    files = [SignatureFile(signature_path(folder, index), dedupe) for index in range(tasks)]
    found = search(files, dedupe, say)
    entries = []
    for index, ordinals in enumerate(found.ordinals):
        path = _build_dropped_path(folder, index)
        path.write_bytes(ordinals.astype("<u4", copy=False).tobytes())
        entries.append({"name": path.name, "documents": len(ordinals), "sha256": shard_files.sha256_of_file(path)})
    record = {
        "v": 1,
        "identity": identity,
        "kinds": list(dedupe.kinds),
        "threshold": dedupe.threshold,
        "documents": found.documents,
        "dropped": found.counts,
        "tasks": entries,
    }
    shard_files.write_json(folder / "duplicates.json", record)
    for index in range(tasks):
        signature_path(folder, index).unlink()
    return record


def read_duplicates(folder: Path, identity: str) -> dict[str, Any] | None:
    """Return the record of a finished search with this identity; None if a file does not match its digest."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = read_object(folder / "duplicates.json")
        mine = record["v"] == 1 and record["identity"] == identity
        names = record["tasks"]
        if mine and all(shard_files.sha256_of_file(folder / entry["name"]) == entry["sha256"] for entry in names):
            return record
    return None


def drop_filter(folder: Path, index: int) -> Drop:
    """Return a function to call once per document of a task, in order; it returns whether to drop the document."""
    going = iter(np.fromfile(_build_dropped_path(folder, index), dtype="<u4").tolist())
    number, next_one = -1, next(going, -1)

    def is_dropped() -> bool:
        nonlocal number, next_one
        number += 1
        if number != next_one:
            return False
        next_one = next(going, -1)
        return True

    return is_dropped


def _build_dropped_path(folder: Path, index: int) -> Path:
    return folder / f"dropped-{index:06d}.bin"


def check_fingerprint_room(folder: Path, text_bytes: int, dedupe: Dedupe, say: Callable[[str], None]) -> None:
    """Report the disk space for the fingerprints of `text_bytes` of text; SetupError if there is too little."""
    need, free = text_bytes * dedupe.bytes_per_document // _DOCUMENT_BYTES, shutil.disk_usage(folder).free
    say(f"making fingerprints of {text_bytes / 1e6:,.1f} MB of text; they need about {need / 1e9:,.2f} GB temporarily")
    if need > free:
        raise SetupError(
            "disk.too_small",
            f"The documents' fingerprints need {ceil((need - free) / 1e6):,} MB more than is free in {folder}.",
            hint="Name a folder on another disk with --out, or compare less: --dedupe url,exact.",
        )


def describe_duplicates(record: dict[str, Any]) -> str:
    """Return a sentence with the number of dropped documents."""
    dropped: dict[str, int] = record["dropped"]
    each = ", ".join(f"{kind} {count:,}" for kind, count in dropped.items())
    return f"{sum(dropped.values()):,} of {record['documents']:,} documents are duplicates and are dropped ({each})"
