"""Processes that do one item after the other. They may be killed at any moment, and end with their parent.

An item's result must not depend on who does it; what it writes, it writes so that a kill does no harm (see task.py).
What every item needs is loaded once, by a process that does nothing else and then forks those who work: a vocabulary
takes as much memory for sixteen as for one. Where forking is not safe each loads its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from trainer.prepare.corpora.forks import serve
from trainer.prepare.errors import Refusal

__all__ = ["Job", "Tell", "work_through"]

_MAPPED_BYTES = 1 << 17
_END_S = 10.0
_MAY_FORK = sys.platform == "linux"
"""Not on macOS, whose system libraries may have threads of their own by then."""

Tell = Callable[[int], None]
"""Hears of progress within an item, in whatever unit the job counts."""


class Job(Protocol):
    """What is done with every item; it goes to each process once, pickled."""

    def open(self) -> Callable[[Any, Tell], Any]:
        """Load what every item needs, in the process that works or one that forks it; the function that does an item.

        It starts no thread.
        """
        ...


def work_through(
    job: Job, items: Sequence[Any], processes: int, tell: Callable[[int, int], None]
) -> Iterator[tuple[int, Any]]:
    """Do every item in one of so many processes; yields (its place, its result) in the order in which they end.

    `tell` hears (place, count) of what a job tells about the item at that place.
    Raises a worker's Refusal or OSError, and a Refusal for one that died; all others are killed then, as they are when
    the caller stops iterating.
    """
    # Of large blocks glibc keeps a hundred megabytes when they are freed, but for those that it maps one by one.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(_MAPPED_BYTES))
    # numpy's library of linear algebra, which nobody here needs, would start a thread for every core in each of them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    waiting = list(enumerate(items))[::-1]
    hosts: dict[Connection, Any] = {}
    try:
        _start(job, min(processes, len(items)), hosts)
        # Each with the place of the item that it does; at first with one that is not there.
        busy = dict.fromkeys(hosts, -1)
        for worker in hosts:
            _next_item(worker, busy, waiting, hosts)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                place = busy[ready]
                kind, value = _heard(ready, hosts)
                if kind == "tell":
                    tell(place, value)
                    continue
                _next_item(ready, busy, waiting, hosts)
                yield place, value
    finally:
        _end(set(hosts.values()))


def _start(job: Job, processes: int, hosts: dict[Connection, Any]) -> None:
    """Start so many workers; adds each one's connection, with the process that is to be ended for it."""
    context = multiprocessing.get_context("spawn")
    left = processes
    while left:
        pipes = [context.Pipe() for _ in range(left if _MAY_FORK else 1)]
        host = context.Process(target=serve, args=(job, [theirs for _, theirs in pipes]), daemon=True)
        host.start()
        for ours, theirs in pipes:
            theirs.close()
            hosts[ours] = host
        left -= len(pipes)


def _end(hosts: set[Any]) -> None:
    """End all, and those that they forked; nothing is written any more afterwards."""
    for host in hosts:
        host.terminate()
    for host in hosts:
        host.join(_END_S)
        host.kill()
        host.join()


def _next_item(
    to: Connection, busy: dict[Connection, int], waiting: list[tuple[int, Any]], hosts: dict[Connection, Any]
) -> None:
    """Give a worker its next item, or send it home."""
    if waiting:
        busy[to], item = waiting.pop()
        try:
            to.send(item)
        except BrokenPipeError:
            raise _died(hosts[to]) from None
        return
    del busy[to]
    to.close()


def _heard(worker: Connection, hosts: dict[Connection, Any]) -> tuple[str, Any]:
    """A worker's word: ("tell", n) or ("done", result)."""
    try:
        kind, value = worker.recv()
    except (EOFError, ConnectionResetError):
        raise _died(hosts[worker]) from None
    if kind == "failed":
        raise value
    return kind, value


def _died(host: Any) -> Refusal:
    host.join(_END_S)
    return Refusal(
        "prepare.worker_died",
        f"One of the processes was ended from outside (exit code {host.exitcode}).",
        hint="If memory ran out, take fewer: --workers 1. The same command goes on where it stood.",
    )
