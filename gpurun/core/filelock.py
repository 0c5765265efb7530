"""Locks, so that only one process at a time reads and then writes a file."""

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
    """Wait for the kernel lock of a file and hold it; a holder's death releases it. OSError if it cannot be opened.

    While another process holds it, `meanwhile` is called repeatedly; an exception from it ends the wait.
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
    """Open a file for locking, and create it if necessary; OSError if that fails."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Try to take the kernel lock of an open file, and return whether it is held now.

    A `shared` lock only checks whether another process holds it.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
