"""One process at a time where several would read and then write the same file."""

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
    """Wait for the kernel lock of a file and hold it; a holder's death frees it. OSError where that cannot be.

    Where another may hold it for long, `meanwhile` is called again and again; what it raises ends the waiting.
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
    """Open a file for its lock, and make it where there is none; OSError where that cannot be."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the kernel lock of an open file if nobody else has it; whether it is held here now.

    A `shared` one only looks whether somebody has it.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
