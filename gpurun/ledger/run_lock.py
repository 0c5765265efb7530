"""The lock of a run, which only one process at a time can have. The kernel releases the lock of a process that dies."""

from __future__ import annotations

import json
import os
import platform
import weakref
from pathlib import Path
from types import TracebackType

from gpurun.core.clock import SystemClock, ticks, utc
from gpurun.core.errors import RunHeld, SetupError
from gpurun.core.filelock import open_lock, take_lock
from gpurun.core.paths import open_regular
from gpurun.core.untrusted import parse_object

# `holder_of` takes the lock for an instant; a process that wants the lock retries for this time.
_READERS_PASS_S = 0.2


class RunLock:
    """The lock of a run, as a context manager.

    Entering raises `RunHeld`, which names the process that has the lock, also if it is this process. The lock's file
    stays after the release: only the kernel's lock counts, not that the file exists or contains a process id.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        clock = SystemClock()
        for _ in ticks(clock, 0.02, _READERS_PASS_S):
            if self._try_to_lock():
                self._write_owner(clock)
                return self
        run = self._path.parent.name
        raise RunHeld(
            "run.held",
            f"The run {run} is driven by another gpurun: {holder_of(self._path) or 'it is just ending'}.",
            hint=f"Watch it with `gpurun attach {run}`, or end it with `gpurun stop {run}`.",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _try_to_lock(self) -> bool:
        """Try once to take the lock; return False if it is held, by a reader for an instant or by a supervisor."""
        try:
            descriptor = open_lock(self._path)
        except OSError as error:
            raise _unlockable_error(self._path, error) from error
        try:
            is_taken = take_lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _unlockable_error(self._path, error) from error
        if not is_taken:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        _held.add(self)
        return True

    def _write_owner(self, clock: SystemClock) -> None:
        """Write into the file which process has the lock, for the messages of other processes."""
        if self._descriptor is None:
            return
        holder = {"pid": os.getpid(), "host": platform.node(), "started": utc(clock.wall())}
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except OSError:
            # On a full disk the lock still works, but its file does not name the process.
            return

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder_of(path: Path) -> str | None:
    """Return in words which process has a lock; None if the lock is free, or if its file cannot be read."""
    try:
        lock = open_regular(path)
    except OSError:  # The file is missing, or belongs to another user.
        return None
    with lock:
        return None if take_lock(lock.fileno(), shared=True) else _describe_owner(os.pread(lock.fileno(), 4096, 0))


def _describe_owner(content: bytes) -> str:
    """Return the note in a lock's file in words. A missing or broken note also means that a process has the lock."""
    try:
        note = parse_object(content)
        return f"process {int(note['pid'])} on {str(note['host'])!r} since {note['started']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not written its name yet"


def _unlockable_error(path: Path, error: OSError) -> SetupError:
    return SetupError(
        "run.unlockable",
        f"{path} cannot be locked: {error.strerror}.",
        hint="Choose a folder on a local disk that you may write: --home DIR or GPURUN_HOME.",
    )


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_locks_in_child() -> None:
    """Close the locks in a forked child; otherwise the child would keep the run locked after its parent's death."""
    for lock in list(_held):
        lock._release()


os.register_at_fork(after_in_child=_close_locks_in_child)
