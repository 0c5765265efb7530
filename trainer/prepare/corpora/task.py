"""One task of a division: its documents become one training shard and one held-out shard, or nothing at all.

A task may be done by any process of any executor, twice or on another machine: its files are the same to the byte, and
its record, written last, says that they are whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.prepare.corpus import pieces
from trainer.prepare.shards import ShardWriter, sha256_of_file, sync_folder, write_json
from trainer.prepare.texts import Text, visible
from trainer.prepare.tokenizers import Tokenizer

__all__ = ["UNFINISHED", "Drop", "is_held_out", "read_record", "record_path", "write_task"]

Drop = Callable[[Text], bool]
"""Says of a document that it is left out (a duplicate); it may count on being asked once a document, in order."""

UNFINISHED = ".task-"
_WRITTEN_BYTES = 1 << 20
_UNBOUNDED = 1 << 62


def write_task(
    texts: Iterable[Text],
    tokenizer: Tokenizer,
    folder: Path,
    index: int,
    *,
    val_fraction: float,
    identity: str = "",
    drop: Drop | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Write a task's documents into `folder` and return its record, which is `task-INDEX.json` there from then on.

    Training tokens go to `train_INDEX+1.bin`, those of documents that are held out (see `is_held_out`) to
    `val_INDEX.bin`; a file without tokens is not made. Before each document stands the end-of-text token, where the
    tokeniser has one. `identity` names what the bytes depend on besides the texts; a record is believed only for its
    own. `tell` hears how many more bytes of text were written. Documents stream, some megabytes at a time.

    The record: {"v": 1, "index", "identity", "documents", "dropped", "bytes" (of text, UTF-8), "digest" (sha256 over
    the sha256 of each text taken), "train": [entry], "val": [entry]}, an entry as in data.json.
    """
    with _workplace(folder, index) as place:
        counts = {"documents": 0, "dropped": 0, "bytes": 0}
        digest = hashlib.sha256()
        train = ShardWriter(place, "train", _UNBOUNDED, number=index + 1)
        val = ShardWriter(place, "val", _UNBOUNDED, number=index)
        splitter = _Splitter(tokenizer, train, val, val_fraction)
        written = 0
        with train, val:
            for part in _taken(texts, drop, counts):
                splitter.take(part)
                digest.update(part.sha256)
                counts["documents"] += not part.continues
                counts["bytes"] += part.bytes
                if counts["bytes"] - written >= _WRITTEN_BYTES:
                    splitter.write()
                    tell(counts["bytes"] - written)
                    written = counts["bytes"]
            splitter.write()
        tell(counts["bytes"] - written)
        files = {"train": train.entries, "val": val.entries}
        for entry in [*train.entries, *val.entries]:
            os.rename(place / entry["name"], folder / entry["name"])
        sync_folder(folder)
        record = {"v": 1, "index": index, "identity": identity, **counts, "digest": digest.hexdigest(), **files}
        # Written and synced under another name first: there is never a record that promises more than the disk holds.
        write_json(place / "record.json", record)
        os.rename(place / "record.json", record_path(folder, index))
        sync_folder(folder)
    return record


def record_path(folder: Path, index: int) -> Path:
    """Where the record of a finished task stands."""
    return folder / f"task-{index:06d}.json"


def read_record(folder: Path, index: int, identity: str = "") -> dict[str, Any] | None:
    """The record of a task that was finished with this identity, once its files hold to its digests; else None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record: dict[str, Any] = json.loads(record_path(folder, index).read_bytes())
        files = [*record["train"], *record["val"]]
        names = {f"train_{index + 1:06d}.bin", f"val_{index:06d}.bin"}
        mine = record["v"] == 1 and record["index"] == index and record["identity"] == identity
        if mine and {file["name"] for file in files} <= names:
            whole = all(sha256_of_file(folder / file["name"]) == file["sha256"] for file in files)
            return record if whole else None
    return None


def is_held_out(sha256: bytes, val_fraction: float) -> bool:
    """Whether a document is held out: a matter of the sha256 of its (first) text alone, so equal ones never part."""
    return int.from_bytes(sha256[:8], "big") < val_fraction * 2.0**64


@contextlib.contextmanager
def _workplace(folder: Path, index: int) -> Iterator[Path]:
    """A folder of this process's own for unfinished files; what a killed one leaves goes when it is gone on with."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{index:06d}-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class _Part:
    """A text that is taken: the length and the sha256 of its UTF-8, and whether it goes on with what is before it."""

    text: str
    bytes: int
    sha256: bytes
    continues: bool


def _taken(texts: Iterable[Text], drop: Drop | None, counts: dict[str, int]) -> Iterator[_Part]:
    """Each document that is neither blank nor dropped; what goes on with one shares its fate."""
    taken = False
    for text in visible(texts):
        if not text.continues:
            taken = drop is None or not drop(text)
            counts["dropped"] += not taken
        if taken:
            yield _part(text)


def _part(text: Text) -> _Part:
    raw = text.text.encode("utf-8")
    return _Part(text.text, len(raw), hashlib.sha256(raw).digest(), text.continues)


class _Splitter:
    """Tokenises texts, each into the split that its document belongs to."""

    def __init__(self, tokenizer: Tokenizer, train: ShardWriter, val: ShardWriter, val_fraction: float) -> None:
        self._tokenizer, self._train, self._val, self._val_fraction = tokenizer, train, val, val_fraction
        self._before = np.array([] if tokenizer.eot_id is None else [tokenizer.eot_id], dtype=np.uint16)
        self._now = train
        self._rows: dict[ShardWriter, list[np.ndarray]] = {train: [], val: []}

    def take(self, part: _Part) -> None:
        """Tokenise a text; a long one goes piece by piece."""
        if not part.continues:
            self._now = self._val if is_held_out(part.sha256, self._val_fraction) else self._train
            self._rows[self._now].append(self._before)
        for piece in pieces(part.text):
            self._rows[self._now] += self._tokenizer.encode([piece])

    def write(self) -> None:
        """Write what was taken since."""
        for writer, rows in self._rows.items():
            if rows:
                writer.write(np.concatenate(rows))
                rows.clear()
