"""A file that is being downloaded. Which parts have arrived, in any order, is recorded across interruptions.

A list beside the content records what was written. Until the next boot the whole list is valid, even if processes are
killed. After a boot only the synced ranges are valid, which the list also records. Only the sha256 decides whether the
file is right. The process that has the file open holds a kernel lock on it, so that no other process can write to a
file whose digest was verified.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gpurun.core.clock import SystemClock, boot_id, ticks
from gpurun.core.filelock import take_lock
from gpurun.core.paths import fsync_file
from gpurun.remote.interface import MachineLost

WAIT_S = 5.0
_LOOK_S = 0.05
_BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_CONTENT = re.compile(r"([0-9a-f]{64})(\.aside)?")
_PIECE = re.compile(rb"^(\d{1,18}) (\d{1,18})$", re.MULTILINE)
_SYNCED = re.compile(rb"^synced (\d{1,18})$", re.MULTILINE)


class HeldElsewhere(MachineLost):
    """Another process is downloading the file, which may soon be complete: try again."""


class Partial:
    """A partly downloaded file at `path`, which will have `size_bytes`. Several threads may write in parallel.

    Opening raises HeldElsewhere if another process has the file open for longer than WAIT_S.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._list_path = locate_notes(path)
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._content, self._list = -1, -1
        self._room = bytearray(_BLOCK_BYTES)

    def __enter__(self) -> Partial:
        self._content = _open_locked(self._path)
        try:
            self._list = os.open(self._list_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError:
            os.close(self._content)
            raise
        self._digest, self._digested = hashlib.sha256(), 0
        self._have = self._read_noted_ranges()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._content)
        os.close(self._list)

    @property
    def have_bytes(self) -> int:
        """Return how many bytes have arrived."""
        return sum(end - start for start, end in self._have)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the start and end of each missing range, in order."""
        edges = [0, *(edge for extent in self._have for edge in extent), self._size_bytes]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    def write(self, offset: int, block: bytes) -> None:
        """Write a block at `offset`. It counts as arrived only once `remember` has recorded its range."""
        view = memoryview(block)
        while view:
            written = os.pwrite(self._content, view, offset)
            view, offset = view[written:], offset + written

    def remember(self, offset: int, length: int) -> None:
        """Record that this range was written."""
        os.write(self._list, b"%d %d\n" % (offset, length))
        with self._lock:  # Readers need no lock: the list is replaced, never changed.
            self._have = _merge_ranges([*self._have, (offset, offset + length)])

    def discard(self) -> None:
        """Delete all arrived content."""
        os.ftruncate(self._content, 0)
        self._rewrite_notes([])
        self._have = []
        self._digest = hashlib.sha256()
        self._digested = 0

    def digest_on(self) -> None:
        """Add to the digest what has arrived without a gap from the beginning. Call this during the download."""
        end = self._have[0][1] if self._have and self._have[0][0] == 0 else 0
        while self._digested < end:
            room = memoryview(self._room)[: end - self._digested]
            read_bytes = os.preadv(self._content, [room], self._digested)
            if not read_bytes:
                return
            self._digest.update(room[:read_bytes])
            self._digested += read_bytes

    def is_whole(self, sha256: str) -> bool:
        """Return whether the file is complete and has this digest."""
        self.digest_on()
        is_here = self._digested == self._size_bytes == os.fstat(self._content).st_size
        return is_here and self._digest.hexdigest() == sha256

    def sync(self) -> None:
        """Sync the bytes written so far to disk, and record that in the list."""
        noted_bytes = os.fstat(self._list).st_size
        getattr(os, "fdatasync", fsync_file)(self._content)
        os.write(self._list, b"synced %d\n" % noted_bytes)

    def settle(self, target: Path) -> None:
        """Sync the complete file to disk and rename it to `target`."""
        fsync_file(self._content)
        os.replace(self._path, target)
        with suppress(FileNotFoundError):
            os.unlink(self._list_path)

    def remove(self) -> None:
        """Delete the partial file, because the finished file exists."""
        for path in (self._list_path, self._path):
            path.unlink(missing_ok=True)

    def _read_noted_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges in the list that are still valid, and prepare the list for more."""
        with open(os.dup(self._list), "rb") as file:
            file.seek(0)
            text = file.read()
        is_this_boot = text.startswith(_boot_line())
        if not is_this_boot:
            text = text[: max((int(found[1]) for found in _SYNCED.finditer(text)), default=0)]
        here_bytes = min(self._size_bytes, os.fstat(self._content).st_size)
        pieces = [(int(found[1]), int(found[1]) + int(found[2])) for found in _PIECE.finditer(text)]
        have = _merge_ranges([piece for piece in pieces if piece[1] <= here_bytes])
        if not is_this_boot:
            self._rewrite_notes(have)
        elif not text.endswith(b"\n"):
            os.write(self._list, b"\n")  # A killed process left an incomplete line.
        os.ftruncate(self._content, here_bytes)
        return have

    def _rewrite_notes(self, on_disk: list[tuple[int, int]]) -> None:
        """Replace the list by one that has only the ranges on disk."""
        text = _boot_line() + b"".join(b"%d %d\n" % (start, end - start) for start, end in on_disk)
        os.ftruncate(self._list, 0)
        os.write(self._list, text + b"synced %d\n" % len(text))


def _boot_line() -> bytes:
    return f"boot {boot_id()}\n".encode()


def locate_notes(path: Path) -> Path:
    """Return the path of the list of what has arrived of the file at `path`."""
    return path.with_name(f"{path.name}.parts")


def forget_others(folder: Path, digests: Collection[str]) -> None:
    """Delete partial files with other digests than the given ones, except those that a process has open."""
    for path in folder.glob("*"):
        found = _CONTENT.fullmatch(path.name)
        if found is None or found[1] in digests:
            continue
        descriptor = _try_open_locked(path)
        if descriptor >= 0:
            locate_notes(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Open the file at `path`, created if missing, and lock it. Return its descriptor; closing it ends the lock."""
    for _ in ticks(SystemClock(), _LOOK_S, WAIT_S):
        descriptor = _try_open_locked(path)
        if descriptor >= 0:
            return descriptor
    raise HeldElsewhere(f"{path.name[:12]}… is being downloaded by another process.")


def arrived_bytes(notes: bytes) -> int:
    """Return how many bytes have arrived according to the content of such a list."""
    return sum(int(found[2]) for found in _PIECE.finditer(notes))


def _try_open_locked(path: Path) -> int:
    """Try once to open and lock the file. Return its descriptor, or -1 if another process has it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(FileNotFoundError):
            # The earlier holder may have completed and renamed the file. It must not be changed then.
            is_free = take_lock(descriptor)
            if is_free and os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                alone, descriptor = descriptor, -1
                return alone
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return -1


class Taker:
    """Writes a stream to a partial file from `offset` on. Each piece of about a megabyte is recorded in the list.

    Blocks are not collected first: new memory for every piece would take longer than the copying.
    """

    def __init__(self, partial: Partial, offset: int) -> None:
        self._partial = partial
        self._start = offset
        self._length = 0

    def take(self, block: bytes) -> None:
        """Add the next block."""
        self._partial.write(self._start + self._length, block)
        self._length += len(block)
        if self._length >= _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Record the range that was written since the last call."""
        if self._length:
            self._partial.remember(self._start, self._length)
            self._start, self._length = self._start + self._length, 0


def _merge_ranges(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, without overlaps."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
