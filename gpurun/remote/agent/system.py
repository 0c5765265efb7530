"""The base of every verb: refusals, the machine's clocks, and its files: read, replaced as a whole, and locked."""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import sys
import time

# This is set everywhere in the agent, because importing typing would cost each poll milliseconds.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Iterator, Optional, Tuple, Union

    Json = Dict[str, Any]
    Answer = Tuple[Json, Union[bytes, Iterable[Union[bytes, memoryview]]]]  # (one JSON line, raw bytes that follow it)

MOST_PART_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20
MOST_JSON_BYTES = 64 << 20  # The list of a hundred thousand files has about twenty million bytes.


class Refusal(Exception):
    """A refusal of a call, with a stable code. `more` has further figures for the client."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.error = dict(more, code=code, message=message)


def monotonic() -> float:
    """Return seconds by a clock that setting the time does not change. It includes sleep if the kernel can count it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return an id of this boot; "" if unknown. Monotonic times can be compared only within one boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def cores() -> int:
    """Return how many cores this process may use. A cluster's job has only some cores of its node."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        threads = os.environ.get(name, "")
        if threads.isdigit() and int(threads):
            return min(count, int(threads))
    return count


def path_in(root: str, *names: str) -> str:
    """Return a path below the run folder."""
    return os.path.join(root, *names)


def read(*names: str) -> Any:
    """Return a JSON file's content; None if it is missing or incomplete."""
    try:
        with open(path_in(*names), "rb") as file:
            return json.loads(file.read(MOST_JSON_BYTES))
    except (FileNotFoundError, ValueError):
        return None


def write(path: str, data: Json, durable: bool = True) -> None:
    """Replace a JSON file as a whole; if `durable`, so that it survives a power failure."""
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
    """Make new names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sync_filesystem(folder: str) -> None:
    """Make everything written to a folder's file system survive a power failure, with one sync for all files."""
    import ctypes

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if getattr(ctypes.CDLL(None), "syncfs", lambda _: -1)(descriptor):
            os.sync()
    finally:
        os.close(descriptor)


def say(what: str) -> None:
    """Write a line to this process's log; a full disk must not end the process."""
    try:
        print(what, file=sys.stderr, flush=True)
    except OSError:
        return


def read_part(path: str, offset: int, most: int) -> Tuple[bytes, int]:
    """Return at most `most` bytes of a regular file, and the file's size; a missing file is empty."""
    try:
        file, size = open_part(path, offset, most)
    except FileNotFoundError:
        return b"", 0
    with file:
        return file.read(min(most, MOST_PART_BYTES)), size


def stream(path: str, offset: int, most: int) -> Tuple[Iterator[memoryview], int, int]:
    """Return a regular file's bytes as blocks (each valid until the next), the number of bytes, and the file's size."""
    try:
        file, size = open_part(path, offset, most)
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


def open_part(path: str, offset: int, most: int) -> Tuple[io.FileIO, int]:
    """Return a regular file, open at an offset, and its size. Raise FileNotFoundError if it does not exist."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode) or offset < 0 or most < 0:
        file.close()
        raise Refusal("not_regular", "%s is not a regular file" % os.path.basename(path))
    file.seek(offset)
    return file, facts.st_size


def lock(root: str, name: str, wait_s: float) -> Optional[int]:
    """Return a kernel lock as a descriptor (close it to release the lock); None if it is not free within `wait_s`."""
    descriptor, end = os.open(path_in(root, "agent", name), os.O_RDWR | os.O_CREAT, 0o600), monotonic() + wait_s
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
    """Return the lock as `lock` does. Raise Refusal `busy` if another process holds it for longer than `wait_s`."""
    held = lock(root, name, wait_s)
    if held is None:
        raise Refusal("busy", "another call holds %s" % name)
    return held
