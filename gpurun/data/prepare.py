"""Turns a source of any size into a data folder: deduplicates and splits its documents, and tokenises on all cores.

`gpurun train --data TEXT` and `gpurun data prepare` use this module. The folder also holds the state: `prepare.json`
records the request, and `task-*.json` the finished tasks. Repeating the request resumes an interrupted prepare; a
different request is refused. `data.json` is written last and completes the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.untrusted import read_object
from gpurun.data.dedupe.signatures import Dedupe
from gpurun.data.dedupe.stage import (
    FingerprintWriter,
    check_fingerprint_room,
    describe_duplicates,
    drop_filter,
    find_duplicates,
    read_duplicates,
)
from gpurun.data.documents import documents_of
from gpurun.data.layout import AS_FOUND, Layout
from gpurun.data.prepare_state import (
    DUPLICATES,
    known_files,
    lasting_digest,
    locked_folder,
    record_request,
    remove_paths,
    remove_state,
    remove_work,
)
from gpurun.data.refusals import Say, translate_refusals
from gpurun.data.source_file import Document
from gpurun.data.sources import TextSource, open_source
from gpurun.data.split import bound_for, bound_for_few, hash_text
from gpurun.data.tasks import UNFINISHED, Task, Tell, divide, read_record, write_task
from gpurun.data.vocabulary import make_vocabulary
from gpurun.data.workers import work_through

FORMAT = 7
"""Increase this whenever the same source would give different bytes, so that older work is not resumed."""
SHARD_TOKENS = 100_000_000
BYTES_PER_TOKEN = 4
"""Bytes of English text per GPT-2 token, rounded down; used to give a shard about the requested number of tokens."""
_FEW_BYTES = 64 << 20
"""Up to this size, all documents are read before it is decided which are held out."""
_SAMPLE_BYTES = 256 << 10
_ALLOWANCE = 1.1
"""The factor that allows for the error of an estimate from a sample."""

Progress = Callable[[dict[str, int]], None]
"""Receives {"done_bytes", "total_bytes", "tokens", "tasks", "total_tasks"}."""


@dataclass(frozen=True)
class PrepareOrder:
    """A request to prepare data; `request` returns the fields on which the output bytes depend (docs/DATA.md).

    `vocab_size` is the size of a tokeniser that is trained on the corpus (0: the default), `limit_bytes` the amount of
    text to use (0: all). Fewer tokens than `least_train_tokens` or `least_val_tokens` are refused.
    """

    source: str
    tokenizer: str
    out: Path
    val_fraction: float = 0.1
    shard_tokens: int = SHARD_TOKENS
    layout: Layout = AS_FOUND
    vocab_size: int = 0
    limit_bytes: int = 0
    dedupe: Dedupe | None = None
    least_train_tokens: int = 1
    least_val_tokens: int = 1
    accept_skipped: bool = False

    def request(self, source: TextSource) -> dict[str, Any]:
        """Return everything that the output bytes depend on, keyed by the names that messages use."""
        return {
            "format": FORMAT,
            "source": source.digest,
            "tokenizer": self.tokenizer,
            "val-fraction": self.val_fraction,
            "shard-tokens": self.shard_tokens,
            **self.layout.flags,
            "vocab-size": self.vocab_size,
            "limit-bytes": self.limit_bytes,
            "dedupe": str(self.dedupe or "none"),
        }


@dataclass(frozen=True)
class Prepared:
    """A finished folder: its data.json, the skipped files by reason, and whether this call made it."""

    folder: Path
    manifest: dict[str, Any]
    passed_over: dict[str, int]
    made: bool


@dataclass(frozen=True)
class Writer:
    """The work of writing shards: tokenises a task's documents with the vocabulary in the folder."""

    folder: Path
    tokenizer: str
    bound: int
    identity: str
    layout: Layout
    duplicates: Path | None = None
    """The folder with the lists of dropped documents."""

    def do(self, index: int, documents: Iterable[Document], tell: Tell) -> None:
        """Make the shards of a task, unless they exist."""
        if self.record(index) is None:
            drop = drop_filter(self.duplicates, index) if self.duplicates else None
            tokenizer, identity = _load_tokenizer(self), self.identity
            write_task(
                documents, tokenizer, self.folder, index, bound=self.bound, identity=identity, drop=drop, tell=tell
            )

    def record(self, index: int, *, verified: bool = True) -> dict[str, Any] | None:
        """Return the record of a finished task; None if its shards do not match their digests."""
        return read_record(self.folder, index, self.identity, verified=verified)


@lru_cache(maxsize=1)
def _load_tokenizer(writer: Writer) -> tokenizers.TextTokenizer:
    """Return the writer's tokeniser, which is loaded once per process and vocabulary."""
    return tokenizers.tokenizer_of(writer.tokenizer, tokenizers.read_vocabulary(writer.folder), threads=1)


@dataclass(frozen=True)
class BegunPreparation:
    """A preparation that is ready to run: the inspected source, the request, all tasks, and the writer."""

    source: TextSource
    request: dict[str, Any]
    tasks: tuple[Task, ...]
    writer: Writer

    @cached_property
    def done(self) -> dict[int, dict[str, Any]]:
        """Return the records of the finished tasks, each verified once."""
        return {index: record for index in range(len(self.tasks)) if (record := self.writer.record(index))}

    @property
    def left(self) -> list[tuple[int, Task]]:
        """Return the unfinished tasks, as (index, task)."""
        return [(index, task) for index, task in enumerate(self.tasks) if index not in self.done]


def prepare(
    order: PrepareOrder,
    say: Say,
    progress: Progress = lambda _: None,
    *,
    workers: int = 1,
    executor: str = "processes",
) -> Prepared:
    """Make `order.out` a finished data folder (docs/FORMATS.md), or resume where an earlier call ended.

    UsageError if the source cannot be prepared, SetupError if the output cannot be written. In both cases finished work
    is kept, and the same order resumes it.
    """
    with translate_refusals("Finished work is kept; the same command resumes it."), locked_folder(order.out):
        begun = begin_preparing(order, say)
        if isinstance(begun, Prepared):
            return begun
        meter = _Meter(begun, progress, order.dedupe is not None)
        if order.dedupe is not None:
            _mark_duplicates(order, begun, workers, executor, meter, say)
        try:
            for index in work_through(begun.writer, begun.left, workers, executor, meter.read):
                if record := begun.writer.record(index, verified=False):
                    begun.done[index] = record
                    meter.finished(record)
        finally:
            remove_paths(order.out.glob(f"{UNFINISHED}*"))
        return finish_preparing(order, begun, say)


def begin_preparing(order: PrepareOrder, say: Say) -> BegunPreparation | Prepared:
    """Inspect the source, record the request, and make the vocabulary; return the result if it is already finished."""
    if Path(os.path.realpath(order.out)).is_relative_to(os.path.realpath(order.source)):
        raise UsageError(
            "data.out_in_source",
            f"{order.out} is inside {order.source}: the new shards would become part of the source.",
            hint="Name a folder outside it with --out.",
        )
    order.out.mkdir(parents=True, exist_ok=True)
    source = open_source(
        order.source,
        order.layout,
        say,
        val_fraction=order.val_fraction,
        limit_bytes=order.limit_bytes,
        accept_skipped=order.accept_skipped,
        known=known_files(order.out, order.layout),
    )
    request = order.request(source)
    if (order.out / "data.json").exists():
        return _read_finished_result(order, source, request, say)
    bytes_per_token = 1 if order.tokenizer == "char" else BYTES_PER_TOKEN
    tasks = tuple(divide(source.files, order.shard_tokens, bytes_per_token))
    record_request(order.out, request, source)
    remove_paths(order.out.glob(f"{UNFINISHED}*"))
    facts = [_count_phrase(len(source.files), "file"), f"{source.text_bytes / 1e6:,.1f} MB of text"]
    say(", ".join([*facts, _count_phrase(len(tasks), "part")]))
    if groups := [weight for file in source.files if file.form == "parquet" for weight in file.weights]:
        say(f"the largest row group has {max(groups) / 1e6:,.1f} MB of text: each process needs about that much memory")
    bound = _compute_held_out_bound(order, source, tasks)
    tokenizer = make_vocabulary(order.out, order.tokenizer, order.vocab_size, tasks, order.layout, say)
    named = {**request, "vocabulary": tokenizers.sha256_of_tokens(tokenizer.tokens), "bound": bound}
    identity = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    duplicates = order.out / DUPLICATES if order.dedupe else None
    begun = BegunPreparation(
        source, request, tasks, Writer(order.out, order.tokenizer, bound, identity, order.layout, duplicates)
    )
    if begun.done:
        say(f"resuming: {len(begun.done)} of {len(tasks)} parts are done and intact")
    _check_room(order.out, [task for _, task in begun.left], tokenizer, order.layout, say)
    return begun


def finish_preparing(order: PrepareOrder, begun: BegunPreparation, say: Say) -> Prepared:
    """Write data.json, which lists the shards of all tasks, and remove the files that only a resume needs."""
    if begun.left:
        what = f"Part {begun.left[0][0]} of {len(begun.tasks)} has missing or damaged shards in {order.out}."
        raise UsageError("prepare.task_failed", what, hint="The same command resumes from the finished parts.")
    done = [begun.done[index] for index in range(len(begun.tasks))]
    entries = {split: [entry for record in done for entry in record[split]] for split in ("train", "val")}
    for split, least in (("train", order.least_train_tokens), ("val", order.least_val_tokens)):
        found = sum(entry["tokens"] for entry in entries[split])
        say(f"{split}: {found:,} tokens")
        if found < least:
            remove_work(order.out)
            raise UsageError(
                "data.too_small",
                f"{order.source} has {found:,} tokens for {split}; the recipe needs at least {least:,}.",
                hint="Use more text, hold out a different share, or choose a recipe with a smaller batch or context: "
                "course-lab needs only 230 characters.",
            )
    sums = {name: sum(record[name] for record in done) for name in ("documents", "dropped", "bytes")}
    digest = hashlib.sha256("".join(record["digest"] for record in done).encode()).hexdigest()
    request_digest = lasting_digest(begun.request, begun.source)
    about = {"kind": begun.source.kind, "asked": request_digest, "digest": digest, **sums}
    about |= {"divided": begun.source.divided} if begun.source.divided else {}
    tokens = tokenizers.read_vocabulary(order.out)
    tokenizer = tokenizers.tokenizer_of(order.tokenizer, tokens)
    manifest = shard_files.manifest_of(order.tokenizer, tokens, tokenizer.eot_id, about, entries)
    shard_files.write_json(order.out / "data.json", manifest)
    remove_state(order.out)
    return Prepared(order.out, manifest, dict(begun.source.passed_over), made=True)


def _compute_held_out_bound(order: PrepareOrder, source: TextSource, tasks: Sequence[Task]) -> int:
    """Return the bound below which a document's key is held out; 0 if whole files are held out.

    For a small source, the bound is chosen so that some documents are held out, but not all.
    """
    if source.is_divided:
        return 0
    if source.text_bytes > _FEW_BYTES:
        return bound_for(order.val_fraction)
    found = (
        (hash_text(document.text), len(document.text.encode()))
        for task in tasks
        for document in documents_of(task, order.layout)
    )
    return bound_for_few(found, order.val_fraction, order.source, once=order.dedupe is not None)


def _mark_duplicates(
    order: PrepareOrder, begun: BegunPreparation, workers: int, executor: str, meter: _Meter, say: Say
) -> None:
    """Find and record which documents are dropped, unless an earlier call did so; shards are written afterwards."""
    assert order.dedupe is not None
    folder = order.out / DUPLICATES
    folder.mkdir(exist_ok=True)
    signer = FingerprintWriter(folder, order.dedupe, begun.writer.identity, order.layout)
    record = read_duplicates(folder, signer.identity)
    if record is None:
        left = [(index, task) for index, task in enumerate(begun.tasks) if not signer.is_done(index)]
        check_fingerprint_room(folder, sum(span.text_bytes for _, task in left for span in task), order.dedupe, say)
        for _ in work_through(signer, left, workers, executor, meter.read):
            pass
        say("looking for duplicates among the fingerprints of all documents")
        record = find_duplicates(folder, len(begun.tasks), order.dedupe, identity=signer.identity)
    say(describe_duplicates(record))


class _Meter:
    """Reports the progress of a prepare; signing a byte and tokenising it count the same."""

    def __init__(self, begun: BegunPreparation, progress: Progress, signs: bool) -> None:
        self._figures = {
            "done_bytes": sum(record["bytes"] for record in begun.done.values()),
            "total_bytes": begun.source.text_bytes * (1 + signs),
            "tokens": sum(map(_count_tokens, begun.done.values())),
            "tasks": len(begun.done),
            "total_tasks": len(begun.tasks),
        }
        self._progress = progress
        progress(self._figures)

    def read(self, count: int) -> None:
        """Count `count` more bytes as read."""
        figures = self._figures
        figures["done_bytes"] = min(figures["done_bytes"] + count, figures["total_bytes"])
        self._progress(figures)

    def finished(self, record: dict[str, Any]) -> None:
        """Count a task's shards as finished."""
        self._figures["tasks"] += 1
        self._figures["tokens"] += _count_tokens(record)
        self._progress(self._figures)


def _count_tokens(record: dict[str, Any]) -> int:
    return sum(entry["tokens"] for split in ("train", "val") for entry in record[split])


def _read_finished_result(order: PrepareOrder, source: TextSource, request: dict[str, Any], say: Say) -> Prepared:
    """Return a finished folder's content; UsageError if it was made from a different request."""
    path = order.out / "data.json"
    manifest: dict[str, Any] = {}
    found = None
    with contextlib.suppress(ValueError, KeyError, TypeError):  # Another program may have written the file.
        manifest = read_object(path)
        found = manifest["source"]["asked"]
    newer = any(file.modified_ns > path.stat().st_mtime_ns for file in source.files)
    if newer or found != lasting_digest(request, source):
        raise UsageError(
            "data.out_in_use",
            f"{order.out} contains data from another source, from other options, or from another version of gpurun.",
            hint="Name a new folder with --out, or delete that folder.",
        )
    remove_state(order.out)
    say(f"{order.out} was already prepared from this")
    return Prepared(order.out, manifest, dict(source.passed_over), made=False)


def _count_phrase(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _check_room(
    folder: Path, tasks: Sequence[Task], tokenizer: tokenizers.TextTokenizer, layout: Layout, say: Say
) -> None:
    """Report the disk space that the shards will need, estimated from a sample; SetupError if there is too little."""
    text_bytes = sum(span.text_bytes for task in tasks for span in task)
    size = tokens = 0
    for task in {place: tasks[place] for place in (0, len(tasks) // 2, len(tasks) - 1)}.values() if tasks else ():
        taken_bytes = 0
        for document in documents_of(task, layout):
            sample = document.text[:_SAMPLE_BYTES]
            taken_bytes += len(sample.encode())
            tokens += 1 + sum(map(len, tokenizer.encode([sample])))
            if taken_bytes >= _SAMPLE_BYTES:
                break
        size += taken_bytes
    need, free = int(2 * text_bytes * (tokens / max(1, size)) * _ALLOWANCE), shutil.disk_usage(folder).free
    if need > _FEW_BYTES:
        say(f"the shards need about {need / 1e9:,.2f} GB of disk; {free / 1e9:,.2f} GB are free")
    if need > free:
        raise SetupError(
            "disk.too_small",
            f"The shards need about {need / 1e9:,.2f} GB, but the disk of {folder} has less free space.",
            hint=f"Free {ceil((need - free) / 1e6):,} MB, or name a folder on another disk with --out.",
        )
