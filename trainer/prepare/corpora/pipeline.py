"""From a source of any size to a finished data folder: divided, tokenised by as many processes as there are cores.

The folder itself is the state: `prepare.json` says what was asked for, `task-*.json` which tasks are done. A killed
prepare is gone on with by asking again; asking for something else is refused. `data.json` is written last and ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.prepare.corpora.division import BYTES_PER_TOKEN, Task, divide
from trainer.prepare.corpora.executors import Executor
from trainer.prepare.corpora.jobs import TaskWriter
from trainer.prepare.corpora.look import LOOK_SHARE, look_at_rows, rows_of
from trainer.prepare.corpora.meter import Meter, Pass, Progress
from trainer.prepare.corpora.resume import (
    DUPLICATES,
    begin,
    identity_of,
    is_begun,
    is_looked_at,
    keep_looked_at,
    known_files,
    lasting_digest,
    remove_state,
    remove_unfinished,
    remove_work,
    what_is_asked,
)
from trainer.prepare.corpora.room import check_room
from trainer.prepare.corpora.task import read_record, record_path
from trainer.prepare.corpora.vocabulary import make_vocabulary
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.dedupe.stage import mark_duplicates
from trainer.prepare.errors import Refusal
from trainer.prepare.folders import held
from trainer.prepare.manifest import finish_folder, summary_of
from trainer.prepare.shards import SHARD_TOKENS, sha256_of_file
from trainer.prepare.sources.opening import Source, open_source
from trainer.prepare.tokenizers import CharTokenizer, Tokenizer

__all__ = ["Order", "Progress", "prepare_corpus"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What to prepare, and how: see docs/DATA.md. The last four change nothing in what is written.

    `vocab_size` is that of a tokeniser that is made of the corpus; 0: its own choice.
    """

    source: str
    tokenizer: str
    out: Path
    val_fraction: float = 0.005
    shard_tokens: int = SHARD_TOKENS
    column: str = "text"
    vocab_size: int = 0
    dedupe: Dedupe | None = None
    executor: str = "processes"
    workers: int = 1
    least_train_tokens: int = 1
    least_val_tokens: int = 1


def prepare_corpus(order: Order, say: Say, progress: Progress) -> dict[str, Any]:
    """Make `order.out` a data folder (docs/FORMATS.md), or go on where an earlier call was ended; what it holds.

    Raises Refusal; other OSErrors come from writing. Either way what is finished stays, for the same order again.
    """
    if Path(os.path.realpath(order.out)).is_relative_to(os.path.realpath(order.source)):
        raise Refusal(
            "data.out_in_source",
            f"{order.out} lies within {order.source}: the shards would be part of the text that they are made of.",
            hint="Name a folder elsewhere with --out.",
        )
    with held(order.out):
        source = open_source(order.source, order.column, say, known_files(order.out, order.column))
        asked = what_is_asked(source, order.tokenizer, order.val_fraction, order.shard_tokens, order.column,
                              vocab_size=order.vocab_size, dedupe=str(order.dedupe or "none"))  # fmt: skip
        if (order.out / "data.json").exists():
            return _already(order, source, asked, say)
        begin(order.out, asked, source)
        remove_unfinished(order.out)
        per_token = 1 if order.tokenizer == CharTokenizer.name else BYTES_PER_TOKEN
        tasks = divide(source.files, order.shard_tokens, per_token)
        what = f"{_counted(len(source.files), 'file')}, {source.text_bytes / 1e6:,.1f} MB of text"
        say(f"{what}, {_counted(len(tasks), 'shard')} to make in {_counted(min(order.workers, len(tasks)), 'process')}")
        size = order.vocab_size
        tokenizer = make_vocabulary(order.out, order.tokenizer, size, tasks, order.column, order.workers, say)
        identity = identity_of(asked, tokenizer)
        records = _records(order.out, tasks, identity, say)
        left = [(index, task) for index, task in enumerate(tasks) if index not in records]
        check_room(order.out, [task for _, task in left], tokenizer, order.column, say)
        executor = Executor(order.executor, order.workers, order.column, order.out)
        meter = Meter(len(tasks), progress)
        writing = meter.add_pass(tasks)
        _read_before(order, executor, asked, tasks, meter, say)
        try:
            records |= _work(order, executor, identity, records, left, meter, writing)
        finally:
            remove_unfinished(order.out)
        return _finish(order, source, asked, tokenizer, [records[index] for index in range(len(tasks))], say)


def _records(folder: Path, tasks: Sequence[Task], identity: str, say: Say) -> dict[int, dict[str, Any]]:
    """The records of the tasks that are done, by index; each is believed once its shards hold to its digests."""
    done = [index for index in range(len(tasks)) if record_path(folder, index).exists()]
    records = {index: record for index in done if (record := read_record(folder, index, identity))}
    if done:
        say(f"going on: {len(records)} of {len(tasks)} shards are done and sound")
    return records


def _read_before(
    order: Order, executor: Executor, asked: dict[str, Any], tasks: Sequence[Task], meter: Meter, say: Say
) -> None:
    """The passes before the one that writes: what is wrong with the rows, and which documents are duplicates."""
    # To count the characters for a vocabulary, all of it was read.
    seen = order.tokenizer == CharTokenizer.name or is_looked_at(order.out, asked)
    rows = [] if seen else rows_of(tasks)
    looking, signing = meter.add_pass(rows, LOOK_SHARE), meter.add_pass(tasks if order.dedupe else ())
    if rows:
        look_at_rows(rows, executor, looking, say)
        keep_looked_at(order.out, asked)
    if order.dedupe:
        named = json.dumps(asked, sort_keys=True)
        place = order.out / DUPLICATES
        mark_duplicates(place, tasks, order.dedupe, source=named, executor=executor, signing=signing, say=say)


def _work(
    order: Order,
    executor: Executor,
    identity: str,
    records: dict[int, dict[str, Any]],
    left: list[tuple[int, Task]],
    meter: Meter,
    writing: Pass,
) -> dict[int, dict[str, Any]]:
    """Do the tasks that are left; their records by index."""
    for index, record in records.items():
        writing.read(index)
        meter.written(_tokens(record))
    meter.report()
    new: dict[int, dict[str, Any]] = {}
    duplicates = order.out / DUPLICATES if order.dedupe else None
    job = TaskWriter(order.out, order.tokenizer, order.val_fraction, identity, duplicates)
    for index, record in executor.work(job, left, writing.part):
        new[index] = record
        writing.read(index)
        meter.written(_tokens(record))
        meter.report()
    return new


def _tokens(record: dict[str, Any]) -> int:
    return sum(entry["tokens"] for split in ("train", "val") for entry in record[split])


def _finish(
    order: Order,
    source: Source,
    asked: dict[str, Any],
    tokenizer: Tokenizer,
    records: list[dict[str, Any]],
    say: Say,
) -> dict[str, Any]:
    """Write data.json, which ends it, and remove what was only needed to go on."""
    for split, least in (("train", order.least_train_tokens), ("val", order.least_val_tokens)):
        found = sum(entry["tokens"] for record in records for entry in record[split])
        say(f"{split}: {found:,} tokens")
        if found < least:
            remove_work(order.out)
            raise Refusal(
                "data.too_small",
                f"{order.source} gives {found:,} tokens to {split}; the recipe needs at least {least:,}.",
                hint="Take more text, another --val-fraction, or a recipe with a smaller batch or context.",
            )
    about = {"kind": source.kind, "asked": lasting_digest(asked, source)}
    manifest = finish_folder(order.out, tokenizer, records, about)
    remove_state(order.out)
    return _result(order, manifest, dict(source.skipped), made=True)


def _already(order: Order, source: Source, asked: dict[str, Any], say: Say) -> dict[str, Any]:
    """What a finished folder holds, if it was made of this; else a Refusal."""
    path = order.out / "data.json"
    manifest: dict[str, Any] = {}
    found = None
    with contextlib.suppress(ValueError, KeyError, TypeError):  # It may be another program's.
        manifest = json.loads(path.read_bytes())
        found = manifest["source"]["asked"]
    newer = any(file.modified_ns > path.stat().st_mtime_ns for file in source.files)
    if newer or found != lasting_digest(asked, source):
        raise Refusal(
            "data.out_in_use",
            f"{order.out} holds data that was prepared from something else, or with other options.",
            hint="Name another folder with --out, or delete that one.",
        )
    if is_begun(order.out):
        remove_state(order.out)
    say(f"{order.out} was prepared from this already")
    return _result(order, manifest, dict(source.skipped), made=False)


def _result(order: Order, manifest: dict[str, Any], skipped: dict[str, int], *, made: bool) -> dict[str, Any]:
    summary = summary_of(manifest, order.out, sha256_of_file(order.out / "data.json"), order.source)
    return {"v": 1, "data": summary, "source": manifest["source"], "skipped": skipped, "made": made}


def _counted(count: int, what: str) -> str:
    ending = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{ending}"
