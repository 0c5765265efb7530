"""How far a prepare is, in bytes of text over all its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.prepare.corpora.division import Task

__all__ = ["Meter", "Pass", "Progress"]

Progress = Callable[[dict[str, int]], None]
"""Hears how far it is: done_bytes, total_bytes (of text, as expected), tokens, tasks, total_tasks."""


class Meter:
    """Adds up what several processes tell of the tasks that they are at."""

    def __init__(self, total_tasks: int, progress: Progress) -> None:
        self._total_tasks, self._progress = total_tasks, progress
        self._passes: list[Pass] = []
        self._tokens = self._tasks = 0

    def add_pass(self, tasks: Sequence[Task], share: float = 1.0) -> Pass:
        """One more pass, over these tasks; all are added before anything is told, or what is left would be less.

        `share` is what a byte of it counts, so that the rate tells how long the rest takes: less where it takes less.
        """
        self._passes.append(Pass(tasks, share, self.report))
        return self._passes[-1]

    def written(self, tokens: int) -> None:
        """A task's shards are there, with so many tokens."""
        self._tokens += tokens
        self._tasks += 1

    def report(self) -> None:
        """Tell it."""
        figures = {"tokens": self._tokens, "tasks": self._tasks, "total_tasks": self._total_tasks}
        done, total = sum(one.done for one in self._passes), sum(one.total for one in self._passes)
        self._progress({"done_bytes": int(done), "total_bytes": int(total), **figures})


class Pass:
    """How far one pass is."""

    def __init__(self, tasks: Sequence[Task], share: float, report: Callable[[], None]) -> None:
        self._weights = [sum(span.text_bytes for span in task) for task in tasks]
        self._share, self.report = share, report
        self.total = share * sum(self._weights)
        self._read = 0
        self._halves: dict[int, int] = {}

    @property
    def done(self) -> float:
        """What was read counts."""
        # What a row has besides its text was expected too: a task is never further than all of it.
        return self._share * (self._read + sum(min(half, self._weights[at]) for at, half in self._halves.items()))

    def part(self, index: int, count: int) -> None:
        """So many more bytes of a task were read."""
        self._halves[index] = self._halves.get(index, 0) + count
        self.report()

    def read(self, index: int) -> None:
        """A task was read to its end."""
        self._halves.pop(index, None)
        self._read += self._weights[index]
