"""Who does the tasks of a corpus: processes of this machine, or datatrove's executors, here or on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.prepare.corpora.division import Task, forms_of
from trainer.prepare.corpora.jobs import TextJob
from trainer.prepare.corpora.resume import LOGS, UNPACKING
from trainer.prepare.corpora.workers import Tell, work_through
from trainer.prepare.errors import Refusal
from trainer.prepare.sources.files import Form
from trainer.prepare.sources.reading import load_for, read_spans

__all__ = ["EXECUTORS", "Executor", "Numbered"]

EXECUTORS = ("processes", "datatrove", "ray")

Numbered = tuple[int, Task]
"""A task with its index."""


@dataclass(frozen=True)
class Executor:
    """One of EXECUTORS with so many tasks at once; logs and dictionaries of large pages lie in `folder` meanwhile."""

    kind: str
    workers: int
    column: str
    folder: Path

    @property
    def logs(self) -> Path:
        """Where datatrove writes what it does."""
        return self.folder / LOGS

    @property
    def unpack_in(self) -> Path:
        """Where the dictionaries of large pages are kept."""
        return self.folder / UNPACKING

    def work(
        self, job: TextJob, tasks: Sequence[Numbered], tell: Callable[[int, int], None]
    ) -> Iterator[tuple[int, Any]]:
        """Do the job with every task; yields (index, the job's result) as they end, from datatrove's at the very end.

        `tell` hears (index, count) of what the job tells; nothing from datatrove's. Raises Refusal and OSError as the
        job does; a Refusal with the place of the logs where datatrove ends without having done all of it.
        """
        if self.kind == "processes":
            told = lambda place, count: tell(tasks[place][0], count)  # noqa: E731
            reading = _Reading(job, self.column, self.unpack_in, forms_of(task for _, task in tasks))
            for place, result in work_through(reading, tasks, self.workers, told):
                yield tasks[place][0], result
            return
        if tasks:
            with _errors_into(self.logs):
                _run_datatrove(self, job, tasks)
        for index, _ in tasks:
            result = job.result(index)
            if result is None:
                raise Refusal(
                    "prepare.task_failed",
                    f"Task {index} of {len(tasks)} was not done by {self.kind}; {self.logs} has its logs.",
                    hint="The same command goes on with what is finished. --executor processes says more of an error.",
                )
            yield index, result


@dataclass(frozen=True)
class _Reading:
    """The job of a worker of our own: read a task, have the job done with its documents."""

    job: TextJob
    column: str
    unpack_in: Path
    forms: frozenset[Form]

    def open(self) -> Callable[[Numbered, Tell], Any]:
        """Load what the job needs, and what the files are read with."""
        load_for(self.forms)
        do = self.job.open()

        def read(numbered: Numbered, tell: Tell) -> Any:
            index, task = numbered
            return do(index, read_spans(task, self.column, self.unpack_in), tell)

        return read


def _run_datatrove(executor: Executor, job: TextJob, tasks: Sequence[Numbered]) -> None:
    try:
        import datatrove  # noqa: F401

        if executor.kind == "ray":
            import ray  # noqa: F401
    except ImportError as error:
        extra = "ray" if executor.kind == "ray" else "data"
        raise Refusal(
            "prepare.not_installed",
            f"--executor {executor.kind} needs {error.name}.",
            hint=f"Install it, from the clone: pip install '.[{extra}]'; or leave --executor away.",
        ) from None
    from trainer.prepare.corpora.datatrove_steps import CorpusReader, JobSink, run_local, run_ray

    reader = CorpusReader(tasks, executor.column, executor.unpack_in)
    steps = [reader, JobSink(job, [index for index, _ in tasks])]
    run = run_ray if executor.kind == "ray" else run_local
    run(steps, len(tasks), executor.workers, executor.logs)


@contextlib.contextmanager
def _errors_into(logs: Path) -> Iterator[None]:
    """Let standard error, of the processes that are started meanwhile too, go into a file beside the logs."""
    logs.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(logs / "executor.log", "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
