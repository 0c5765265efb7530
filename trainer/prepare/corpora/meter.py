"""How far a prepare is, in bytes of text over all its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.prepare.corpora.division import Task

__all__ = ["Meter", "Progress"]

Progress = Callable[[dict[str, int]], None]
"""Hears how far it is: done_bytes, total_bytes (of text, as expected), tokens, tasks, total_tasks."""


class Meter:
    """Adds up what several processes tell of the tasks that they are at."""

    def __init__(self, tasks: Sequence[Task], passes: int, progress: Progress) -> None:
        self._weights = [sum(span.text_bytes for span in task) for task in tasks]
        self._total, self._progress = passes * sum(self._weights), progress
        self._done = self._tokens = self._tasks = 0
        self._halves: dict[int, int] = {}

    def part(self, index: int, count: int) -> None:
        """So many more bytes of a task were read."""
        self._halves[index] = self._halves.get(index, 0) + count
        self.report()

    def read(self, index: int) -> None:
        """A task was read to its end, in one of the passes."""
        self._halves.pop(index, None)
        self._done += self._weights[index]

    def written(self, index: int, tokens: int) -> None:
        """A task's shards are there, with so many tokens."""
        self.read(index)
        self._tokens += tokens
        self._tasks += 1

    def report(self) -> None:
        """Tell it."""
        # What a row has besides its text was expected too: a task is never further than all of it.
        now = sum(min(half, self._weights[index]) for index, half in self._halves.items())
        figures = {"tokens": self._tokens, "tasks": self._tasks, "total_tasks": len(self._weights)}
        self._progress({"done_bytes": self._done + now, "total_bytes": self._total, **figures})
