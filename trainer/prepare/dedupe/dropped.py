"""Signing the documents of each task, searching all of them once, and the filter that a task's documents go through.

In the folder lie `signatures-INDEX.bin` while tasks are signed; then `dropped-INDEX.bin` (ascending uint32: the numbers
of the task's documents that go) and, written last, `duplicates.json`; with it the signatures are removed. A task may be
signed by any process; the same texts give the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.prepare.dedupe.search import Found, search
from trainer.prepare.dedupe.signatures import Dedupe, SignatureFile, SignatureWriter, signature_path
from trainer.prepare.shards import sha256_of_file, sync_folder, write_json
from trainer.prepare.texts import Text, visible

__all__ = ["drop_filter", "find_duplicates", "identity_of", "is_signed", "read_duplicates", "sign_task"]

FORMAT = 2
"""Counts up whenever the same texts would be told apart otherwise."""


def identity_of(source: str, dedupe: Dedupe) -> str:
    """What the result depends on: `source` (which names the texts and their division) and the choice of duplicates."""
    parts = [FORMAT, source, sorted(dedupe.kinds), dedupe.threshold]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def sign_task(
    texts: Iterable[Text],
    dedupe: Dedupe,
    folder: Path,
    index: int,
    *,
    identity: str = "",
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the fingerprints of a task's documents; `tell` hears of each document's characters.

    Blank documents have no number here, as `write_task` leaves them out before it asks its filter.
    """
    with SignatureWriter(folder, index, dedupe, identity) as writer:
        for text in visible(texts):
            writer.add(text)
            tell(len(text.text))


def is_signed(folder: Path, index: int, dedupe: Dedupe, identity: str = "") -> bool:
    """Whether a task was signed with this identity, and its file is what was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return SignatureFile(signature_path(folder, index), dedupe).is_sound(identity)
    return False


def find_duplicates(
    folder: Path, tasks: int, dedupe: Dedupe, *, identity: str = "", say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Search the fingerprints of all tasks, write what goes, and return the record of it.

    The record: {"v": 1, "identity", "kinds", "threshold", "documents", "dropped": {kind: documents}, "tasks": [{"name",
    "documents", "sha256"}]}. Signatures that are missing or damaged raise OSError or ValueError.
    """
    files = [SignatureFile(signature_path(folder, index), dedupe) for index in range(tasks)]
    found = search(files, dedupe, say)
    entries = []
    for index, ordinals in enumerate(found.ordinals):
        path = _dropped_path(folder, index)
        unfinished = path.with_name(f".{path.name}-{os.getpid()}")
        with open(unfinished, "wb") as file:
            file.write(ordinals.astype("<u4", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, path)
        entries.append({"name": path.name, "documents": len(ordinals), "sha256": sha256_of_file(path)})
    record = _record(dedupe, identity, found, entries)
    unfinished = folder / f".duplicates.json-{os.getpid()}"
    write_json(unfinished, record)
    os.rename(unfinished, folder / "duplicates.json")
    sync_folder(folder)
    for index in range(tasks):
        signature_path(folder, index).unlink()
    return record


def read_duplicates(folder: Path, identity: str = "") -> dict[str, Any] | None:
    """The record of a search that was finished with this identity, once its files hold to its digests; else None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record: dict[str, Any] = json.loads((folder / "duplicates.json").read_bytes())
        mine = record["v"] == 1 and record["identity"] == identity
        if mine and all(sha256_of_file(folder / entry["name"]) == entry["sha256"] for entry in record["tasks"]):
            return record
    return None


def drop_filter(folder: Path, index: int) -> Callable[[Text], bool]:
    """A filter for one pass over a task's documents: it is asked of each in order, and says whether that one goes."""
    going = iter(np.fromfile(_dropped_path(folder, index), dtype="<u4").tolist())
    number, next_one = -1, next(going, -1)

    def goes(_: Text) -> bool:
        nonlocal number, next_one
        number += 1
        if number != next_one:
            return False
        next_one = next(going, -1)
        return True

    return goes


def _dropped_path(folder: Path, index: int) -> Path:
    return folder / f"dropped-{index:06d}.bin"


def _record(dedupe: Dedupe, identity: str, found: Found, entries: list[dict[str, Any]]) -> dict[str, Any]:
    choice = {"kinds": list(dedupe.kinds), "threshold": dedupe.threshold}
    return {
        "v": 1,
        "identity": identity,
        **choice,
        "documents": found.documents,
        "dropped": found.counts,
        "tasks": entries,
    }
