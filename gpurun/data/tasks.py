"""Divides a source into tasks, each with about the text of one shard, and writes the shards of a task.

The division depends only on the source and the size of a shard, not on the workers. Any process of any executor may
do a task, even twice or on another machine, because its files are always byte-identical. A task's record is written
last, and confirms that its files are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.untrusted import read_object
from gpurun.data.layout import Layout
from gpurun.data.source_file import DIVISIBLE, Document, FileSpan, SourceFile
from gpurun.data.split import hash_text

UNFINISHED = ".task-"
_TASKS, _LEAST_BYTES = 32, 8 << 20
"""The number of tasks for a source that is too small for so many shards, and the least bytes of text in a task."""
_UNBOUNDED = 1 << 62

Task = tuple[FileSpan, ...]
Tell = Callable[[int], None]
"""Receives the number of bytes of text read since the last call."""
Drop = Callable[[], bool]
"""Called once per document, in order: returns whether to drop it as a duplicate."""


class Work(Protocol):
    """The work to do for each task's documents. It must be picklable, and must write its results to the disk."""

    @property
    def layout(self) -> Layout:
        """Return how to read the files."""
        ...

    def do(self, index: int, documents: Iterable[Document], tell: Tell) -> None:
        """Process a task's documents; the result must be the same on each worker, and appear complete or not at all."""
        ...


def divide(files: Sequence[SourceFile], shard_tokens: int, bytes_per_token: int) -> list[Task]:
    """Return a source's tasks in order; a divisible file is split at the end of a full task.

    A small source has smaller tasks, so that all cores are used, and little work is lost if a process is killed.
    """
    every = sum(file.text_bytes for file in files)
    room = most = min(shard_tokens * bytes_per_token, max(_LEAST_BYTES, every // _TASKS))
    tasks: list[Task] = []
    spans: list[FileSpan] = []
    for file in files:
        start, end = 0, len(file.weights) if file.form == "parquet" else file.text_bytes
        while start < end:
            span = FileSpan(file, start, _find_stop(file, start, end, room))
            spans.append(span)
            room -= span.text_bytes
            start = span.stop
            if room <= 0:
                tasks.append(tuple(spans))
                spans, room = [], most
    return [*tasks, tuple(spans)] if spans else tasks


def _find_stop(file: SourceFile, start: int, end: int, room: int) -> int:
    """Return the end of a span that begins at `start` and fills the remaining room; row groups are not split."""
    if file.form not in DIVISIBLE:
        return end
    if file.form != "parquet":
        return min(end, start + room)
    stop = start
    while stop < end and room > 0:
        room -= file.weights[stop]
        stop += 1
    return stop


def write_task(
    documents: Iterable[Document],
    tokenizer: tokenizers.TextTokenizer,
    folder: Path,
    index: int,
    *,
    bound: int,
    identity: str,
    drop: Drop | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Write a task's shards to `folder`, write its record to `task-INDEX.json`, and return the record.

    The tokens of documents whose key is below `bound` go to `val_INDEX.bin`, all others to `train_INDEX+1.bin`. A file
    without tokens is not made. The end-of-text token, if the tokeniser has one, is written before each document, and
    before a piece of a text that does not follow the previous piece. `identity` identifies everything else that the
    bytes depend on; a record with another identity is not used.

    The record: {"v": 1, "index", "identity", "documents", "dropped", "bytes" (of text, UTF-8), "digest" (sha256 over
    the sha256 of each text used), "train": [entry], "val": [entry]}, an entry as in data.json.
    """
    with _make_private_folder(folder, index) as place:
        counts, digest = {"documents": 0, "dropped": 0, "bytes": 0}, hashlib.sha256()
        writers = {
            "train": shard_files.ShardWriter(place, "train", _UNBOUNDED, number=index + 1),
            "val": shard_files.ShardWriter(place, "val", _UNBOUNDED, number=index),
        }
        with writers["train"], writers["val"]:
            for split, raw, ids in _encode_documents(documents, tokenizer, bound, drop, counts):
                digest.update(hashlib.sha256(raw).digest())
                counts["bytes"] += len(raw)
                writers[split].write(ids)
                tell(len(raw))
        entries = {split: writer.entries for split, writer in writers.items()}
        for entry in [*entries["train"], *entries["val"]]:
            os.rename(place / entry["name"], folder / entry["name"])
        shard_files.sync_folder(folder)
        record = {"v": 1, "index": index, "identity": identity, **counts, "digest": digest.hexdigest(), **entries}
        shard_files.write_json(record_path(folder, index), record)
    return record


def _encode_documents(
    documents: Iterable[Document],
    tokenizer: tokenizers.TextTokenizer,
    bound: int,
    drop: Drop | None,
    counts: dict[str, int],
) -> Iterator[tuple[str, bytes, np.ndarray]]:
    """Yield (split, UTF-8, tokens) for each document that is not dropped; small documents are encoded in batches."""
    before = np.array([] if tokenizer.eot_id is None else [tokenizer.eot_id], dtype=np.uint16)
    last = ""
    for document in documents:
        counts["documents"] += 1
        if drop is not None and drop():
            counts["documents"], counts["dropped"], last = counts["documents"] - 1, counts["dropped"] + 1, ""
            continue
        split = "val" if document.held_out or hash_text(document.text) < bound else "train"
        rows = tokenizer.encode([*tokenizers.cut_for_encoding(document.text)])
        if document.begins or split != last:
            rows.insert(0, before)
        yield split, document.text.encode("utf-8"), np.concatenate(rows) if len(rows) > 1 else rows[0]
        last = split


def record_path(folder: Path, index: int) -> Path:
    """Return the path of a finished task's record."""
    return folder / f"task-{index:06d}.json"


def read_record(folder: Path, index: int, identity: str, *, verified: bool = True) -> dict[str, Any] | None:
    """Return the record of a task that was finished with this identity; None if it is missing or its files are damaged.

    The digests are checked only if `verified`, which is not necessary if this program has just written the files.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = read_object(record_path(folder, index))
        files = [*record["train"], *record["val"]]
        names = {f"train_{index + 1:06d}.bin", f"val_{index:06d}.bin"}
        mine = record["v"] == 1 and record["index"] == index and record["identity"] == identity
        if mine and {file["name"] for file in files} <= names:
            digests = [(folder / file["name"], file["sha256"]) for file in files if verified]
            return record if all(shard_files.sha256_of_file(path) == sha256 for path, sha256 in digests) else None
    return None


@contextlib.contextmanager
def _make_private_folder(folder: Path, index: int) -> Iterator[Path]:
    """Yield a private folder for unfinished files; a later call removes the folder that a killed process left."""
    place = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{index:06d}-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
