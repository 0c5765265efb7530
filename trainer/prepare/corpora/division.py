"""A source divided into tasks, each about as much text as one shard holds.

The division depends on the source and on the size of a shard alone, never on who does the work: so every task has the
same bytes on any number of processes, and what was done stays done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from trainer.prepare.shards import SHARD_TOKENS
from trainer.prepare.sources.files import Form, SourceFile, Span

__all__ = ["BYTES_PER_TOKEN", "Task", "digest_of_files", "divide", "forms_of"]

BYTES_PER_TOKEN = 4
"""Of English text with GPT-2's tokens, rounded down: so that a shard has about as many tokens as were asked for."""

_TASKS, _LEAST_BYTES = 32, 8 << 20
"""A source has about so many tasks if it is too small to fill as many shards, of at least so much text."""

Task = tuple[Span, ...]


def divide(
    files: Sequence[SourceFile], shard_tokens: int = SHARD_TOKENS, bytes_per_token: int = BYTES_PER_TOKEN
) -> list[Task]:
    """The tasks of a source in order; a file that can be divided goes on in the next task where one is full.

    A small source has smaller tasks, so that all cores have something to do and a kill costs little.
    """
    every = sum(file.text_bytes for file in files)
    room = most = min(shard_tokens * bytes_per_token, max(_LEAST_BYTES, every // _TASKS))
    tasks: list[Task] = []
    spans: list[Span] = []
    for file in files:
        start, end = 0, len(file.weights) if file.form == "parquet" else file.text_bytes
        while start < end:
            span = Span(file, start, _stop(file, start, end, room))
            spans.append(span)
            room -= span.text_bytes
            start = span.stop
            if room <= 0:
                tasks.append(tuple(spans))
                spans, room = [], most
    return [*tasks, tuple(spans)] if spans else tasks


def forms_of(tasks: Iterable[Task]) -> frozenset[Form]:
    """The forms of the files of some tasks."""
    return frozenset(span.file.form for task in tasks for span in task)


def digest_of_files(files: Sequence[SourceFile]) -> str:
    """The sha256 over names, forms, sizes and times of files: names a source as it was found."""
    lines = [[file.name, file.form, file.bytes, file.modified_ns] for file in files]
    return hashlib.sha256(json.dumps(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _stop(file: SourceFile, start: int, end: int, room: int) -> int:
    """Where a span ends that begins at `start` and fills what room is left; a row group or a document is never cut."""
    if file.form == "whole":
        return end
    if file.form != "parquet":
        return min(end, start + room)
    stop = start
    while stop < end and room > 0:
        room -= file.weights[stop]
        stop += 1
    return stop
