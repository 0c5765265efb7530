"""The pass that finds what is wrong with the rows of a corpus before anything is made of them.

A line that is no JSON or a damaged page, met in its turn, would cost the work of the hours before it: a file that is
mended makes another source. Texts are looked through as a source is opened already (sources/plain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.prepare.corpora.division import Task, forms_of
from trainer.prepare.corpora.executors import Executor
from trainer.prepare.corpora.meter import Pass
from trainer.prepare.corpora.workers import Tell, work_through
from trainer.prepare.errors import Refusal
from trainer.prepare.sources.files import Form, Span
from trainer.prepare.sources.reading import load_for, read_spans
from trainer.prepare.sources.streams import is_packed

__all__ = ["LOOK_SHARE", "look_at_rows", "rows_of"]

LOOK_SHARE = 0.05
"""Of the time that tokenising a text takes, what reading its rows does: 3 % of Parquet, 5 of JSON, 8 of it in gzip."""
_TOLD_CHARS = 1 << 20


def rows_of(tasks: Sequence[Task]) -> list[Task]:
    """The spans of rows in some tasks, by task. A packed file stands whole in the first: each must unpack it again."""
    found = (tuple(part for span in task for part in _looked_at(span)) for task in tasks)
    return [spans for spans in found if spans]


def look_at_rows(rows: Sequence[Task], executor: Executor, looking: Pass, say: Callable[[str], None]) -> None:
    """Read all of it once, in as many processes of this machine as the executor has tasks at once.

    Raises the Refusal of what is wrong; of several things, of the one that stands first in the source.
    """
    say("reading all rows once before any work, for what is wrong with them")
    job = _Look(executor.column, executor.unpack_in, forms_of(rows))
    left, wrong = set(range(len(rows))), dict[int, Refusal]()
    looking.report()
    for place, refusal in work_through(job, rows, executor.workers, looking.part):
        left.discard(place)
        if refusal:
            wrong[place] = refusal
        # What stands before it may be wrong too, and found a moment later.
        if wrong and (first := min(wrong)) < min(left, default=len(rows)):
            raise wrong[first]
        looking.read(place)
        looking.report()


def _looked_at(span: Span) -> list[Span]:
    if span.file.form not in ("lines", "parquet"):
        return []
    if span.file.form == "lines" and is_packed(span.file.path):
        return [] if span.start else [replace(span, stop=span.file.text_bytes)]
    return [span]


@dataclass(frozen=True)
class _Look:
    """The job of a worker: read some spans and keep nothing; what is wrong with them, or None."""

    column: str
    unpack_in: Path
    forms: frozenset[Form]

    def open(self) -> Callable[[Task, Tell], Refusal | None]:
        """Load what the files are read with."""
        load_for(self.forms)
        return self._look

    def _look(self, spans: Task, tell: Tell) -> Refusal | None:
        read = 0
        try:
            for text in read_spans(spans, self.column, self.unpack_in):
                read += len(text.text)
                if read >= _TOLD_CHARS:
                    tell(read)
                    read = 0
        except Refusal as refusal:
            return refusal
        return None
