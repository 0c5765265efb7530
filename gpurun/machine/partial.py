"""A file that is coming home: what of it has arrived, in any order, and remembered over any number of cuts.

Beside the content lies a list of what was written, each piece with a checksum: after a crash only what is really on the
disk counts. Whether the whole is right is for its sha256 alone to say. Whoever has it open holds its kernel lock, so
that nobody else can write to a file whose digest was verified.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gpurun.core.clock import SystemClock, ticks
from gpurun.machine.base import MachineLost

WAIT_S = 5.0
_LOOK_S = 0.05
_BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


class HeldElsewhere(MachineLost):
    """Somebody else is bringing that file home; it may be here soon, so ask again."""


class Partial:
    """The content at `path`, of which `size_bytes` are wanted. Any number of threads may write at once.

    HeldElsewhere when somebody else has it open for longer than WAIT_S.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._list_path = notes_of(path)
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._content, self._list = -1, -1
        self._room = bytearray(_BLOCK_BYTES)

    def __enter__(self) -> Partial:
        self._content = _opened_alone(self._path)
        try:
            self._list = os.open(self._list_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError:
            os.close(self._content)
            raise
        self._digest, self._digested = hashlib.sha256(), 0
        self._have = self._on_disk()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._content)
        os.close(self._list)

    @property
    def have_bytes(self) -> int:
        """How much has arrived."""
        return sum(end - start for start, end in self._have)

    def gaps(self) -> list[tuple[int, int]]:
        """What has not arrived: each gap's start and end, in order."""
        edges = [0, *(edge for extent in self._have for edge in extent), self._size_bytes]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    def write(self, offset: int, block: bytes) -> None:
        """Put a block where it belongs; it counts when it is remembered."""
        view = memoryview(block)
        while view:
            written = os.pwrite(self._content, view, offset)
            view, offset = view[written:], offset + written

    def remember(self, offset: int, length: int, checksum: int) -> None:
        """Count what was written there."""
        os.write(self._list, b"%d %d %d\n" % (offset, length, checksum))
        with self._lock:  # Readers need none: the list is never altered, only replaced.
            self._have = _merged([*self._have, (offset, offset + length)])

    def discard(self) -> None:
        """Forget everything that has arrived."""
        os.ftruncate(self._content, 0)
        os.ftruncate(self._list, 0)
        self._have, self._digest, self._digested = [], hashlib.sha256(), 0

    def digest_on(self) -> None:
        """Take what has arrived without a gap before it into the digest: meant to be called while more arrives."""
        end = self._have[0][1] if self._have and self._have[0][0] == 0 else 0
        while self._digested < end:
            room = memoryview(self._room)[: end - self._digested]
            read_bytes = os.preadv(self._content, [room], self._digested)
            if not read_bytes:
                return
            self._digest.update(room[:read_bytes])
            self._digested += read_bytes

    def is_whole(self, sha256: str) -> bool:
        """Whether all of it is here and has this digest."""
        self.digest_on()
        is_here = self._digested == self._size_bytes == os.fstat(self._content).st_size
        return is_here and self._digest.hexdigest() == sha256

    def sync(self) -> None:
        """Bring what was written so far to the disk."""
        os.fdatasync(self._content)

    def settle(self, target: Path) -> None:
        """Make it durable and give it its name."""
        os.fsync(self._content)
        os.replace(self._path, target)
        with suppress(FileNotFoundError):
            os.unlink(self._list_path)

    def remove(self) -> None:
        """Leave nothing of it: what it was to become is here."""
        for path in (self._list_path, self._path):
            path.unlink(missing_ok=True)

    def _on_disk(self) -> list[tuple[int, int]]:
        """What the list says and the content confirms."""
        found = []
        for line in _lines(self._list):
            words = line.split(b" ")
            if len(words) != 3 or not all(word.isdigit() for word in words):
                continue  # A crash has cut it.
            offset, length, checksum = map(int, words)
            is_inside = offset + length <= self._size_bytes and length <= 2 * _PIECE_BYTES
            if is_inside and zlib.crc32(os.pread(self._content, length, offset)) == checksum:
                found.append((offset, offset + length))
        if os.fstat(self._content).st_size > self._size_bytes:
            os.ftruncate(self._content, self._size_bytes)
        return _merged(found)


def notes_of(path: Path) -> Path:
    """Where it is noted what has arrived of the content at `path`."""
    return path.with_name(f"{path.name}.parts")


def _opened_alone(path: Path) -> int:
    """The file of that name, made if need be, under its kernel lock; closing it frees it."""
    for _ in ticks(SystemClock(), _LOOK_S, WAIT_S):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            with suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who held it may have given it its name meanwhile: it is finished then, and must not be written to.
                if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                    alone, descriptor = descriptor, -1
                    return alone
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    raise HeldElsewhere(f"{path.name[:12]}… is being brought home by somebody else just now.")


class Taker:
    """Writes what arrives in order from an offset on to a partial file; pieces worth a line of the list are remembered.

    Blocks are not gathered first: fresh memory for every piece would cost more than the copying.
    """

    def __init__(self, partial: Partial, offset: int) -> None:
        self._partial, self._start = partial, offset
        self._length = self._checksum = 0

    def take(self, block: bytes) -> None:
        """Take what has come next, at most a piece at once."""
        self._partial.write(self._start + self._length, block)
        self._checksum = zlib.crc32(block, self._checksum)
        self._length += len(block)
        if self._length >= _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Remember what was written since."""
        if self._length:
            self._partial.remember(self._start, self._length, self._checksum)
            self._start, self._length, self._checksum = self._start + self._length, 0, 0


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same without overlaps, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _lines(descriptor: int) -> list[bytes]:
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read().splitlines()
