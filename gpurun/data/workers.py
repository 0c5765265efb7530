"""Runs the tasks of a corpus: in this process, in several processes, or on datatrove's executors, including Ray."""

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
"""The memory limit of each worker; a row or page within its own limit needs only a fraction of this."""
_PRELOAD = ["numpy", "tiktoken", "gpurun.data.prepare"]


def work_through(
    work: Work, tasks: Sequence[tuple[int, Task]], workers: int, executor: str, tell: Tell
) -> Iterator[int]:
    """Run the work on (index, task) pairs; yield each index when its task ends, and report the bytes read to `tell`.

    An exception of the work is raised here; SetupError if a process was killed. Finished work is kept.
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
        yield from _run_in_processes(work, tasks, min(workers, len(tasks)), tell)


def _run_in_processes(work: Work, tasks: Sequence[tuple[int, Task]], workers: int, tell: Tell) -> Iterator[int]:
    # A fork server that has loaded the modules lets all processes share the memory of one vocabulary.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's linear algebra and its threads are not needed here.
    read, reported = context.Value("q", 0), 0
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(read,)) as pool:
        pending: dict[Future[None], int] = {pool.submit(_do_task, work, *numbered): numbered[0] for numbered in tasks}
        try:
            while pending:
                done, _ = wait(pending, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    yield pending.pop(future)
                now = read.value
                tell(now - reported)
                reported = now
        except MemoryError:
            raise SetupError(
                "prepare.no_memory",
                f"A part of the source needs more than {MOST_MEMORY_BYTES >> 30} GB of memory.",
                hint="Prepare its files one at a time, with --source FILE, to find out which one.",
            ) from None
        except BrokenProcessPool:
            raise SetupError(
                "prepare.worker_died",
                "Another program, or the operating system, killed one of the processes.",
                hint="If memory ran out, use fewer processes: --workers 1. The same command resumes.",
            ) from None
        finally:
            for process in (getattr(pool, "_processes", None) or {}).values():
                if pending:
                    process.kill()
            pool.shutdown(cancel_futures=True)


_read: Any = None


def _begin_worker(read: Any) -> None:
    """Set up a worker process: share the counter of bytes read, and end the worker when its parent ends."""
    global _read
    _read = read
    if sys.platform == "linux":  # Other systems do not enforce the limit.
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with_parent, args=(parent.sentinel,), daemon=True).start()


def _end_with_parent(sentinel: int) -> None:
    wait_for_end([sentinel])
    os._exit(1)


def _do_task(work: Work, index: int, task: Task) -> None:
    def tell(count: int) -> None:
        with _read.get_lock():
            _read.value += count

    work.do(index, documents_of(task, work.layout), tell)


def require_known_executor(executor: str) -> None:
    """Refuse an executor that is not in EXECUTORS."""
    if executor not in EXECUTORS:
        what = f"--executor {executor} is unknown."
        raise UsageError("usage.executor", what, hint=f"Use one of: {', '.join(EXECUTORS)}.")
