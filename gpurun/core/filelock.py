"""File locks: only one process at a time may read a file and then write it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.core.clock import SystemClock

LOOK_S = 0.1


@contextmanager
def exclusive(path: Path, meanwhile: Callable[[], object] | None = None) -> Iterator[None]:
    """Wait for the kernel lock of a file, and hold it during the `with` block; OSError if the file cannot be opened.

    The kernel releases the lock of a process that dies. While another process holds it, `meanwhile` is called
    repeatedly; an exception from that call ends the wait.
    """
    descriptor = open_lock(path)
    try:
        if meanwhile is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            while not take_lock(descriptor):
                meanwhile()
                SystemClock().sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Open a file for locking, create it if necessary, and return its descriptor; OSError if that fails."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Try to take the kernel lock of an open file; return whether this process has it now.

    With `shared`, it only excludes exclusive locks: a caller uses it to check whether another process has one.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
