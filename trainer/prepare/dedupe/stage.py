"""The pass over a corpus that finds its duplicates, before anything of it is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.prepare.corpora.division import Task
from trainer.prepare.corpora.executors import Executor
from trainer.prepare.corpora.jobs import Signer
from trainer.prepare.corpora.meter import Pass
from trainer.prepare.dedupe.dropped import find_duplicates, identity_of, is_signed, read_duplicates
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.errors import Refusal

__all__ = ["mark_duplicates"]

_DOCUMENT_BYTES = 2000
"""What a document is taken to have when the disk is looked at; those of the web have more."""


def mark_duplicates(
    folder: Path,
    tasks: Sequence[Task],
    dedupe: Dedupe,
    *,
    source: str,
    executor: Executor,
    signing: Pass,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write into `folder` which documents of the tasks go, or go on with it; the record that `find_duplicates` makes.

    `source` names the texts and their division. Raises Refusal, and OSError from writing.
    """
    folder.mkdir(exist_ok=True)
    identity = identity_of(source, dedupe)
    record = read_duplicates(folder, identity)
    if record is None:
        signed = {index for index in range(len(tasks)) if is_signed(folder, index, dedupe, identity)}
        left = [(index, task) for index, task in enumerate(tasks) if index not in signed]
        _check_room(folder, [task for _, task in left], dedupe, say)
        for index in signed:
            signing.read(index)
        for index, _ in executor.work(Signer(folder, dedupe, identity), left, signing.part):
            signing.read(index)
            signing.report()
        say("looking for duplicates among the fingerprints of all documents")
        record = find_duplicates(folder, len(tasks), dedupe, identity=identity, say=lambda _: None)
    else:
        for index in range(len(tasks)):
            signing.read(index)
    dropped = record["dropped"]
    each = ", ".join(f"{kind} {count:,}" for kind, count in dropped.items())
    say(f"{sum(dropped.values()):,} of {record['documents']:,} documents are duplicates and go ({each})")
    return record


def _check_room(folder: Path, tasks: Sequence[Task], dedupe: Dedupe, say: Callable[[str], None]) -> None:
    text_bytes = sum(span.text_bytes for task in tasks for span in task)
    need, free = text_bytes * dedupe.bytes_per_document // _DOCUMENT_BYTES, shutil.disk_usage(folder).free
    say(f"fingerprints of {text_bytes / 1e6:,.1f} MB of text first; they need about {need / 1e9:,.2f} GB for a while")
    if need > free:
        raise Refusal(
            "disk.too_small",
            f"The documents' fingerprints need about {need / 1e9:,.2f} GB; {folder} has {free / 1e9:,.2f} GB free.",
            hint="Name a folder on another disk with --out, or compare less: --dedupe url,exact.",
        )
