"""The far side's files: read and replaced whole, served in parts, locked by the kernel."""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import sys
import time

from gpurun.machine.agent.clocks import monotonic
from gpurun.machine.agent.protocol import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, Optional, Tuple

    from gpurun.machine.agent.protocol import Json

MOST_PART_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20
MOST_JSON_BYTES = 64 << 20  # A pack of a hundred thousand files is listed in some twenty million bytes.


def at(root: str, *names: str) -> str:
    """A path below the run folder."""
    return os.path.join(root, *names)


def read(*names: str) -> Any:
    """A JSON file's content; None when it is not there or not whole."""
    try:
        with open(at(*names), "rb") as file:
            return json.loads(file.read(MOST_JSON_BYTES))
    except (FileNotFoundError, ValueError):
        return None


def write(path: str, data: Json, durable: bool = True) -> None:
    """Replace a JSON file whole."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    with open(temporary, "wb") as out:
        out.write(json.dumps(data, sort_keys=True).encode() + b"\n")
        if durable:
            out.flush()
            os.fsync(out.fileno())
    os.replace(temporary, path)
    if durable:
        sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Make new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sync_filesystem(folder: str) -> None:
    """Make all that was written on a folder's file system survive a power cut: one sync, however many files."""
    import ctypes

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if getattr(ctypes.CDLL(None), "syncfs", lambda _: -1)(descriptor):
            os.sync()
    finally:
        os.close(descriptor)


def say(what: str) -> None:
    """Tell the log of whoever runs, if the disk takes it: one that is full must not end who speaks of it."""
    try:
        print(what, file=sys.stderr, flush=True)
    except OSError:
        return


def part(path: str, offset: int, most: int) -> Tuple[bytes, int]:
    """Bytes of a regular file and its size; a file that is not there is empty."""
    try:
        file, size = opened(path, offset, most)
    except FileNotFoundError:
        return b"", 0
    with file:
        return file.read(min(most, MOST_PART_BYTES)), size


def stream(path: str, offset: int, most: int) -> Tuple[Iterator[memoryview], int, int]:
    """Bytes of a regular file in blocks, each good until the next, how many those are, and the file's size."""
    try:
        file, size = opened(path, offset, most)
    except FileNotFoundError:
        return iter(()), 0, 0
    length = max(0, min(most, size - offset))

    def blocks() -> Iterator[memoryview]:
        room, left = memoryview(bytearray(min(BLOCK_BYTES, length))), length
        with file:
            while left:
                size = file.readinto(room[:left])
                if not size:
                    return
                left -= size
                yield room[:size]

    return blocks(), length, size


def opened(path: str, offset: int, most: int) -> Tuple[io.FileIO, int]:
    """A regular file, open at an offset, and its size; FileNotFoundError where there is none."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or offset < 0 or most < 0:
        file.close()
        raise Refusal("not_regular", "%s cannot be read so" % os.path.basename(path))
    file.seek(offset)
    return file, facts.st_size


def lock(root: str, name: str, wait_s: float) -> Optional[int]:
    """A kernel lock as a descriptor (closing it frees it), or None when another holds it for longer than the wait."""
    descriptor, end = os.open(at(root, "agent", name), os.O_RDWR | os.O_CREAT, 0o600), monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if monotonic() >= end:
                os.close(descriptor)
                return None
        time.sleep(0.02)


def locked(root: str, name: str, wait_s: float) -> int:
    """The same, but another holder is a refusal."""
    held = lock(root, name, wait_s)
    if held is None:
        raise Refusal("busy", "another call holds %s" % name)
    return held
