"""Processes that do one item after the other. They may be killed at any moment, and end when whoever started them ends.

An item's result must not depend on who does it; what it writes, it writes so that a kill does no harm (see task.py).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from trainer.prepare.errors import Refusal

__all__ = ["Job", "Tell", "work_through"]

_MAPPED_BYTES = 1 << 20

Tell = Callable[[int], None]
"""Hears of progress within an item, in whatever unit the job counts."""


class Job(Protocol):
    """What is done with every item; it goes to each process once, pickled."""

    def open(self) -> Callable[[Any, Tell], Any]:
        """Load what every item needs, in the process that works; the function that does an item."""
        ...


def work_through(
    job: Job, items: Sequence[Any], processes: int, tell: Callable[[int, int], None]
) -> Iterator[tuple[int, Any]]:
    """Do every item in one of so many processes; yields (its place, its result) in the order in which they end.

    `tell` hears (place, count) of what a job tells about the item at that place.
    Raises a worker's Refusal or OSError, and a Refusal for one that died; all others are killed then, as they are when
    the caller stops iterating.
    """
    # Of blocks of some megabytes glibc keeps hundreds when they are freed, but for those that it maps one by one.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(_MAPPED_BYTES))
    context = multiprocessing.get_context("spawn")
    waiting = list(enumerate(items))[::-1]
    busy: dict[Connection, tuple[Any, int]] = {}
    try:
        for _ in range(min(processes, len(items))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            busy[ours] = process, -1
            _next_item(ours, busy, waiting)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                process, place = busy[ready]
                kind, value = _heard(ready, process)
                if kind == "tell":
                    tell(place, value)
                    continue
                _next_item(ready, busy, waiting)
                yield place, value
    finally:
        for process, _ in busy.values():
            process.kill()
        for process, _ in busy.values():
            process.join()


def _next_item(to: Connection, busy: dict[Connection, tuple[Any, int]], waiting: list[tuple[int, Any]]) -> None:
    """Give a worker its next item, or send it home."""
    process, _ = busy[to]
    if waiting:
        place, item = waiting.pop()
        busy[to] = process, place
        try:
            to.send(item)
        except BrokenPipeError:
            raise _died(process) from None
        return
    del busy[to]
    to.close()
    process.join()


def _heard(worker: Connection, process: Any) -> tuple[str, Any]:
    """A worker's word: ("tell", n) or ("done", result)."""
    try:
        kind, value = worker.recv()
    except (EOFError, ConnectionResetError):
        raise _died(process) from None
    if kind == "failed":
        raise value
    return kind, value


def _died(process: Any) -> Refusal:
    process.join()
    return Refusal(
        "prepare.worker_died",
        f"One of the processes was ended from outside (exit code {process.exitcode}).",
        hint="If memory ran out, take fewer: --workers 1. The same command goes on where it stood.",
    )


def _work(job: Job, of: Connection) -> None:
    """The life of a process: items in, results out, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; whoever started us decides.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        do = job.open()
        while True:
            of.send(("done", do(of.recv(), lambda count: of.send(("tell", count)))))
    except EOFError:
        return
    except (Refusal, OSError) as error:
        of.send(("failed", error))
    except Exception as bug:  # noqa: BLE001 - the other side ends with it; the trace goes to standard error.
        traceback.print_exc()
        of.send(("failed", RuntimeError(f"{type(bug).__name__}: {bug}")))


def _end_with_parent() -> None:
    """A killed parent's children would go on for minutes, into a folder that somebody else may hold by then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
