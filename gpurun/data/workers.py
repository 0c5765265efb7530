"""Who does the tasks of a corpus: this process, some of this machine, or datatrove's executors, here or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end
from typing import Any

from gpurun.core.errors import SetupError, UsageError
from gpurun.data.documents import documents_of
from gpurun.data.tasks import Task, Tell, Work

EXECUTORS = ("processes", "datatrove", "ray")
_LOOK_S = 0.5
MOST_MEMORY_BYTES = 4 << 30
"""Of each process that reads; a row or page within its bound takes a fraction."""
_PRELOAD = ["numpy", "tiktoken", "gpurun.data.prepare"]


def work_through(
    work: Work, tasks: Sequence[tuple[int, Task]], workers: int, executor: str, tell: Tell
) -> Iterator[int]:
    """Do the work with tasks, (index, task) each; yields the indexes as they end, `tell` hears how much was read.

    Raises what the work raises, and SetupError where a process was ended from outside; what is finished stays.
    """
    if executor != "processes":
        from gpurun.data.datatrove_steps import run_datatrove

        run_datatrove(work, tasks, workers, executor)
        yield from (index for index, _ in tasks)
    elif min(workers, len(tasks)) <= 1:
        for index, task in tasks:
            work.do(index, documents_of(task, work.layout), tell)
            yield index
    else:
        yield from _in_processes(work, tasks, min(workers, len(tasks)), tell)


def _in_processes(work: Work, tasks: Sequence[tuple[int, Task]], workers: int, tell: Tell) -> Iterator[int]:
    # A vocabulary takes as much memory for sixteen as for one where all come of a process that has loaded the modules.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # Nobody here needs numpy's linear algebra, and its threads.
    read, told = context.Value("q", 0), 0
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(read,)) as pool:
        pending: dict[Future[None], int] = {pool.submit(_do, work, *numbered): numbered[0] for numbered in tasks}
        try:
            while pending:
                done, _ = wait(pending, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    yield pending.pop(future)
                now = read.value
                tell(now - told)
                told = now
        except MemoryError:
            raise SetupError(
                "prepare.no_memory",
                f"A part of the source needs more than {MOST_MEMORY_BYTES >> 30} GB of memory.",
                hint="One of its files may be made to; prepare them one at a time, with --source FILE, to see which.",
            ) from None
        except BrokenProcessPool:
            raise SetupError(
                "prepare.worker_died",
                "One of the processes was ended from outside.",
                hint="If memory ran out, take fewer: --workers 1. The same command goes on where it stood.",
            ) from None
        finally:
            for process in (getattr(pool, "_processes", None) or {}).values():
                if pending:
                    process.kill()
            pool.shutdown(cancel_futures=True)


_read: Any = None


def _begin(read: Any) -> None:
    """In a worker: where it counts what it has read, and its end with that of the process that it works for."""
    global _read
    _read = read
    if sys.platform == "linux":  # Elsewhere the system does not hold to it.
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for_end([sentinel])
    os._exit(1)


def _do(work: Work, index: int, task: Task) -> None:
    def tell(count: int) -> None:
        with _read.get_lock():
            _read.value += count

    work.do(index, documents_of(task, work.layout), tell)


def demand_executor(executor: str) -> None:
    """Refuse another executor than EXECUTORS."""
    if executor not in EXECUTORS:
        what = f"--executor {executor} is nobody here."
        raise UsageError("usage.executor", what, hint=f"There are: {', '.join(EXECUTORS)}.")
