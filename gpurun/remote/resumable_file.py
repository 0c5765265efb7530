"""A file that is coming home: what of it has arrived, in any order, and remembered over any number of cuts.

Beside the content lies a list of what was written. Until the next boot all of it counts, whichever process is killed
meanwhile; after that what was on the disk by then, which the list says too. Whether the whole is right is for its
sha256 alone to say. The process that has it open holds its kernel lock, so that nobody else can write to a file whose
digest was verified.
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
    """Somebody else is bringing that file home; it may be here soon, so ask again."""


class Partial:
    """The content at `path`, of which `size_bytes` are wanted. Any number of threads may write at once.

    HeldElsewhere when somebody else has it open for longer than WAIT_S.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._list_path = locate_notes(path)
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
        self._have = self._noted()
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

    def remember(self, offset: int, length: int) -> None:
        """Count what was written there."""
        os.write(self._list, b"%d %d\n" % (offset, length))
        with self._lock:  # Readers need none: the list is never altered, only replaced.
            self._have = _merged([*self._have, (offset, offset + length)])

    def discard(self) -> None:
        """Forget everything that has arrived."""
        os.ftruncate(self._content, 0)
        self._note_again([])
        self._have = []
        self._digest = hashlib.sha256()
        self._digested = 0

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
        """Bring what was written so far to the disk, and note that it is there."""
        noted_bytes = os.fstat(self._list).st_size
        getattr(os, "fdatasync", fsync_file)(self._content)
        os.write(self._list, b"synced %d\n" % noted_bytes)

    def settle(self, target: Path) -> None:
        """Make it durable and give it its name."""
        fsync_file(self._content)
        os.replace(self._path, target)
        with suppress(FileNotFoundError):
            os.unlink(self._list_path)

    def remove(self) -> None:
        """Leave nothing of it: what it was to become is here."""
        for path in (self._list_path, self._path):
            path.unlink(missing_ok=True)

    def _noted(self) -> list[tuple[int, int]]:
        """What the list says that still counts; it goes on from there."""
        with open(os.dup(self._list), "rb") as file:
            file.seek(0)
            text = file.read()
        is_this_boot = text.startswith(_boot_line())
        if not is_this_boot:
            text = text[: max((int(found[1]) for found in _SYNCED.finditer(text)), default=0)]
        here_bytes = min(self._size_bytes, os.fstat(self._content).st_size)
        pieces = [(int(found[1]), int(found[1]) + int(found[2])) for found in _PIECE.finditer(text)]
        have = _merged([piece for piece in pieces if piece[1] <= here_bytes])
        if not is_this_boot:
            self._note_again(have)
        elif not text.endswith(b"\n"):
            os.write(self._list, b"\n")  # A process that was killed left half a line.
        os.ftruncate(self._content, here_bytes)
        return have

    def _note_again(self, on_disk: list[tuple[int, int]]) -> None:
        """Begin the list again, with what is on the disk."""
        text = _boot_line() + b"".join(b"%d %d\n" % (start, end - start) for start, end in on_disk)
        os.ftruncate(self._list, 0)
        os.write(self._list, text + b"synced %d\n" % len(text))


def _boot_line() -> bytes:
    return f"boot {boot_id()}\n".encode()


def locate_notes(path: Path) -> Path:
    """Where it is noted what has arrived of the content at `path`."""
    return path.with_name(f"{path.name}.parts")


def forget_others(folder: Path, digests: Collection[str]) -> None:
    """Give back the room of what has arrived of other digests than these; what somebody has open stays."""
    for path in folder.glob("*"):
        found = _CONTENT.fullmatch(path.name)
        if found is None or found[1] in digests:
            continue
        descriptor = _tried_alone(path)
        if descriptor >= 0:
            locate_notes(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _opened_alone(path: Path) -> int:
    """The file of that name, made if need be, under its kernel lock; closing it frees it."""
    for _ in ticks(SystemClock(), _LOOK_S, WAIT_S):
        descriptor = _tried_alone(path)
        if descriptor >= 0:
            return descriptor
    raise HeldElsewhere(f"{path.name[:12]}… is being brought home by somebody else just now.")


def arrived_bytes(notes: bytes) -> int:
    """How much has arrived by such a list, which also grows when nothing has: at each sync, and after each boot."""
    return sum(int(found[2]) for found in _PIECE.finditer(notes))


def _tried_alone(path: Path) -> int:
    """The same at the first try; -1 where somebody else has it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(FileNotFoundError):
            # Who held it may have given it its name meanwhile: it is finished then, and must not be written to.
            is_free = take_lock(descriptor)
            if is_free and os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                alone, descriptor = descriptor, -1
                return alone
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return -1


class Taker:
    """Writes what arrives in order from an offset on to a partial file; pieces worth a line of the list are remembered.

    Blocks are not gathered first: fresh memory for every piece would cost more than the copying.
    """

    def __init__(self, partial: Partial, offset: int) -> None:
        self._partial = partial
        self._start = offset
        self._length = 0

    def take(self, block: bytes) -> None:
        """Take what has come next."""
        self._partial.write(self._start + self._length, block)
        self._length += len(block)
        if self._length >= _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Remember what was written since."""
        if self._length:
            self._partial.remember(self._start, self._length)
            self._start, self._length = self._start + self._length, 0


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same without overlaps, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
