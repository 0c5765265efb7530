"""The other side of `workers.py`: a process that loads what every item needs and forks those who work.

Nobody outlives anybody: they end with the process that forked them, which ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from trainer.prepare.errors import Refusal

__all__ = ["serve"]

Do = Callable[[Any, Callable[[int], None]], Any]


def serve(job: Any, workers: Sequence[Connection]) -> None:
    """The life of a process: load the job, and do items for each of the connections until its other end closes.

    With several it forks a worker for each. SIGTERM ends it and them. It ends as the first worker that was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our parent decides.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _errors_to(workers):
        do: Do = job.open()
        if len(workers) == 1:
            threading.Thread(target=_end_with_parent, daemon=True).start()
            _work(do, workers[0])
        else:
            _fork_workers(do, workers)


def _fork_workers(do: Do, workers: Sequence[Connection]) -> None:
    """Fork a worker for each connection, and wait for their end."""
    gc.collect()
    gc.freeze()  # A look for garbage would write to, and so copy, every page that all share.
    held_here, ours = os.pipe()
    pids: list[int] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until every pid is known to who ends them
    for worker in workers:
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            _live_as_worker(do, worker, [other for other in workers if other is not worker], held_here)
        pids.append(pid)
    for worker in workers:
        worker.close()

    def end_all(number: int, frame: FrameType | None) -> None:
        _kill(pids)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end_all)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            _kill(pids)
            _end_as(os.waitstatus_to_exitcode(status))


def _live_as_worker(do: Do, worker: Connection, others: Sequence[Connection], held_by_host: int) -> None:
    """The life of a worker that was forked; it never returns."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for other in others:
        other.close()  # Or the end of that one would not be seen by who waits for its word.
    threading.Thread(target=_end_when_closed, args=(held_by_host,), daemon=True).start()
    code = 1
    try:
        with _errors_to([worker]):
            _work(do, worker)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _work(do: Do, worker: Connection) -> None:
    """Items in, results out, until the other end closes."""
    while True:
        try:
            item = worker.recv()
        except EOFError:
            return
        worker.send(("done", do(item, lambda count: worker.send(("tell", count)))))


@contextlib.contextmanager
def _errors_to(workers: Sequence[Connection]) -> Iterator[None]:
    """Tell the other side of what goes wrong, by each of these connections."""
    try:
        yield
        return
    except (BrokenPipeError, ConnectionResetError):
        return  # Nobody listens any more.
    except (Refusal, OSError) as error:
        told: Exception = error
    except Exception as bug:  # noqa: BLE001 - the other side ends with it; the trace goes to standard error.
        traceback.print_exc()
        told = RuntimeError(f"{type(bug).__name__}: {bug}")
    for worker in workers:
        worker.send(("failed", told))


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _end_as(code: int) -> None:
    """End with this exit code, or by the signal that it stands for."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other disposition
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with_parent() -> None:
    """A killed parent's children would go on for minutes, into a folder that somebody else may hold by then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _end_when_closed(held_by_host: int) -> None:
    """End as soon as the process that forked this one has ended."""
    os.read(held_by_host, 1)
    os._exit(1)
