"""The kernel lock of the one process that owns a run. Its death, however it dies, is its release."""

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

# A reader who asks who holds the lock takes it for an instant; an owner waits that instant out.
_READERS_PASS_S = 0.2


class RunLock:
    """Exclusive ownership of a run, as a context manager.

    `RunHeld` names the holder when another process has it. The file stays when the lock is gone: only the kernel's
    lock counts, never the file's being there or the process id in it. Reentry in one process is refused as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        clock = SystemClock()
        for _ in ticks(clock, 0.02, _READERS_PASS_S):
            if self._take():
                self._sign(clock)
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
        self._let_go()

    def _take(self) -> bool:
        """Try once; another that has it for an instant or for good is a plain no."""
        try:
            descriptor = open_lock(self._path)
        except OSError as error:
            raise _unlockable(self._path, error) from error
        try:
            is_taken = take_lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _unlockable(self._path, error) from error
        if not is_taken:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        _held.add(self)
        return True

    def _sign(self, clock: SystemClock) -> None:
        """Write who holds it, for the message that others get."""
        if self._descriptor is None:
            return
        holder = {"pid": os.getpid(), "host": platform.node(), "started": utc(clock.wall())}
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except OSError:
            # On a full disk the lock holds all the same; only its holder's name is missing.
            return

    def _let_go(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder_of(path: Path) -> str | None:
    """Who holds a lock, in words, or None when nobody does. Needs no lock and leaves none behind."""
    try:
        lock = open_regular(path)
    except OSError:  # What is another user's, or no lock at all, is not seen to be held.
        return None
    with lock:
        return None if take_lock(lock.fileno(), shared=True) else _words(os.pread(lock.fileno(), 4096, 0))


def _words(content: bytes) -> str:
    """The holder's own note as a clause; a note that is missing or broken still means that somebody is there."""
    try:
        note = parse_object(content)
        return f"process {int(note['pid'])} on {str(note['host'])!r} since {note['started']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said its name yet"


def _unlockable(path: Path, error: OSError) -> SetupError:
    return SetupError(
        "run.unlockable",
        f"{path} cannot be locked: {error.strerror}.",
        hint="Choose a folder on a local disk that you may write: --home DIR or GPURUN_HOME.",
    )


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    """A forked child shares the lock; without this it would keep a dead holder's run locked."""
    for lock in list(_held):
        lock._let_go()


os.register_at_fork(after_in_child=_drop_in_child)
