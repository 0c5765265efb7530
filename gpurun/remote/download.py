"""Downloads one file: over one or several lanes, resumable, and named only once its digest is right.

`chunks.py` has the protocol.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpurun.core.clock import SystemClock
from gpurun.core.errors import CollectFailed, GpurunError, StoreFull
from gpurun.core.paths import fsync_folder, make_private
from gpurun.remote.interface import FarRefusal, MachineLost, Take
from gpurun.remote.messages import MOST_LINE_BYTES, Piece, Sized, locate_file, parse_message, refusal_in
from gpurun.remote.resumable_file import Partial, Taker, arrived_bytes, locate_notes

# The time for a range on a lane, from its first byte on. Each range takes a while to start, but all lanes should end
# together.
RANGE_S = 5.0
MOST_RANGE_BYTES = 2 << 30
LEAST_RANGE_BYTES = 4 << 20
PARTIAL_FOLDER = ".partial"
TICK_S = 0.05
SYNC_S = 0.5
MOST_FRUITLESS = 3
LEFT_FREE_BYTES = 10 * 10**9
_REFETCHES = 3
_PULL_S = 300.0

# Requests `most` bytes from an offset on, and passes them on as they arrive. Fewer may arrive.
Pull = Callable[[int, int, Take], None]


@dataclass(frozen=True)
class WantedFile:
    """A file of a verified manifest that must be downloaded.

    `on_progress` is called with the bytes that have arrived so far, and with 0 if the download starts again. With
    `aside` a separate partial file is used, because another process holds the usual one and makes no progress.
    """

    name: str
    size_bytes: int
    sha256: str
    on_progress: Callable[[int], None] | None = None
    aside: bool = False

    def tell(self, have_bytes: int) -> None:
        """Report how many bytes have arrived. An exception of the callback ends the download."""
        if self.on_progress is not None:
            self.on_progress(have_bytes)


def fetch(expected: WantedFile, into: Path, *pulls: Pull) -> Path:
    """Download one file to `into`/name and return its path. An existing file with the right digest is left alone.

    Each pull is a separate lane; all are used together. Arrived content is kept in `into`/.partial under its digest, so
    a later call fetches only the rest. A file with a wrong digest is downloaded again, up to three times.

    Raise CollectFailed if the digest stays wrong, StoreFull if the file cannot be stored, and HeldElsewhere, a
    MachineLost, if another process is downloading it. Files that were verified before stay unchanged.
    """
    target = locate_file(into, expected.name)
    if has_content(target, expected):
        return target
    try:
        for folder in (into, target.parent, into / PARTIAL_FOLDER):
            make_private(folder)
        name = f"{expected.sha256}.aside" if expected.aside else expected.sha256
        with Partial(into / PARTIAL_FOLDER / name, expected.size_bytes) as partial:
            if has_content(target, expected):  # This process waited while another one downloaded the file.
                partial.remove()
                return target
            _fill_partial(partial, expected, pulls, room=lambda: room_in(into))
            partial.settle(target)
        fsync_folder(target.parent)
    except OSError as error:
        raise _cannot_store_error(target, expected, error) from error
    return target


def has_content(target: Path, expected: WantedFile) -> bool:
    """Return whether `target` has the right size and digest; False if it cannot be read."""
    try:
        with os.fdopen(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if os.fstat(file.fileno()).st_size != expected.size_bytes:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256
    except OSError:
        return False


def noted_bytes(into: Path, sha256: str) -> int:
    """Return how many bytes of a file have arrived, according to the notes of the process that downloads it."""
    try:
        return arrived_bytes(locate_notes(into / PARTIAL_FOLDER / sha256).read_bytes())
    except OSError:
        return 0


def room_in(folder: Path) -> int:
    """Return how many bytes may be downloaded to a folder. A twentieth of the disk, at most 10 GB, stays free."""
    usage = shutil.disk_usage(folder if folder.exists() else folder.parent)
    return usage.free - min(usage.total // 20, LEFT_FREE_BYTES)


def _fill_partial(partial: Partial, expected: WantedFile, pulls: Sequence[Pull], room: Callable[[], int]) -> None:
    """Complete the partial file. If its digest stays wrong, discard its content and raise CollectFailed."""
    for _ in range(1 + _REFETCHES):
        before = -1
        while (have := partial.have_bytes) < expected.size_bytes and have > before:
            if expected.size_bytes - have > room():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            before = have
            Fetching(partial, expected, pulls).run()
        if partial.is_whole(expected.sha256):
            return
        partial.discard()
        expected.tell(0)
    raise CollectFailed(
        "collect.wrong_digest",
        f"{expected.name} was downloaded {1 + _REFETCHES} times, always with another digest or size than announced.",
        hint="Files verified before are kept in artifacts/. The instance or the connection to it is damaged.",
    )


class Fetching:
    """The missing ranges of one file, and the threads that download them: one for each lane."""

    def __init__(self, partial: Partial, expected: WantedFile, pulls: Sequence[Pull]) -> None:
        self._partial, self._expected, self._pulls = partial, expected, pulls
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._lost: MachineLost | None = None
        self._taking, self._clock = threading.Lock(), SystemClock()
        self._todo = deque(partial.gaps())

    def run(self) -> None:
        """Download every missing range. Raise MachineLost if some are still missing because all lanes failed."""
        threads = [threading.Thread(target=self._pull_ranges, args=(pull,), daemon=True) for pull in self._pulls]
        syncing = threading.Thread(target=self._sync_repeatedly, daemon=True)
        for thread in (*threads, syncing):
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(TICK_S)
                    self._partial.digest_on()
                    self._expected.tell(self._partial.have_bytes)
            self._expected.tell(self._partial.have_bytes)
        finally:
            self._stop.set()
            for thread in (*threads, syncing):
                thread.join()
        if self._error is not None:
            raise self._error
        if self._lost is not None and self._todo:
            raise self._lost

    def _sync_repeatedly(self) -> None:
        """Sync the arrived bytes to disk repeatedly: the last sync is then short, and a power failure loses little."""
        while not self._stop.wait(SYNC_S):
            try:
                self._partial.sync()
            except OSError as error:
                self._error = self._error or error
                self._stop.set()

    def _pull_ranges(self, pull: Pull) -> None:
        """Download one range after another over one lane. Put the rest of an interrupted range back."""
        fruitless, size_bytes = 0, LEAST_RANGE_BYTES
        while not self._stop.is_set() and fruitless < MOST_FRUITLESS and (taken := self._take(size_bytes)):
            (start, end), before = taken, self._partial.have_bytes
            try:
                seconds = self._pull_range(pull, start, end)
                size_bytes = int((end - start) * RANGE_S / max(0.001, seconds))
            except MachineLost as lost:
                self._lost = lost
                left = [(max(start, a), min(end, b)) for a, b in self._partial.gaps() if a < end and b > start]
                with self._taking:
                    self._todo.extend(left)
                fruitless = fruitless + 1 if self._partial.have_bytes == before else 0
            except BaseException as error:  # noqa: BLE001 - raised again in `run`, on the caller's thread
                self._error = self._error or error
                self._stop.set()

    def _take(self, size_bytes: int) -> tuple[int, int] | None:
        """Return the next range, about `size_bytes` long; a shorter one near the end: all lanes should end together."""
        with self._taking:
            if not self._todo:
                return None
            start, end = self._todo.popleft()
            missing = end - start + sum(b - a for a, b in self._todo)
            fair_bytes = missing // (2 * len(self._pulls)) if len(self._pulls) > 1 else missing
            most = min(size_bytes, MOST_RANGE_BYTES, fair_bytes)
            cut = min(end, start + max(LEAST_RANGE_BYTES, int(size_bytes // RANGE_S), most))
            if cut < end:
                self._todo.appendleft((cut, end))
            return start, cut

    def _pull_range(self, pull: Pull, start: int, end: int) -> float:
        """Download one range and return the seconds since its first byte. If it fails, keep what has arrived."""
        taker, begun = Taker(self._partial, start), 0.0

        def take(block: bytes) -> None:
            nonlocal begun
            begun = begun or self._clock.monotonic()
            taker.take(block)
            if self._stop.is_set():
                raise _Stopped

        try:
            pull(start, end - start, take)
        finally:
            taker.flush()
        return self._clock.monotonic() - begun


class _Stopped(GpurunError):
    """Ends the calls of the lanes when this process has ended the download; caught in this module."""

    def __init__(self) -> None:
        super().__init__("fetch.stopped", "The download was stopped.", hint="Nothing to do.")


def _cannot_store_error(target: Path, expected: WantedFile, error: OSError) -> StoreFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            "collect.disk_full",
            f"There is no room for {expected.name} ({expected.size_bytes:,} bytes) in {target.parent}.",
            hint="Free disk space: the download then resumes automatically, and leaves a twentieth of the "
            "disk (at most 10 GB) free. The lease keeps counting.",
        )
    return StoreFull(
        "collect.cannot_store",
        f"{target} cannot be written: {error.strerror}.",
        hint="Fix the fault named in the message: the download then resumes automatically. The lease keeps counting.",
    )


class Arriving:
    """Receives the reply to `get`: keeps its first line, and passes on the bytes that this line announces."""

    def __init__(self, name: str, offset: int, most: int, take: Take) -> None:
        self.line = bytearray()
        self.left_bytes = 0
        self._name = name
        self._offset = offset
        self._most = most
        self._take = take
        self._has_line = False

    def __call__(self, block: bytes) -> None:
        """Add the next block. Raise FarRefusal `nonsense` if its line or its length is not as requested."""
        if not self._has_line:
            head, newline, block = block.partition(b"\n")
            self.line += head
            if len(self.line) > MOST_LINE_BYTES:
                raise FarRefusal("nonsense", f"The instance sent {len(self.line)} bytes without a line end.")
            if not newline:
                return
            self._read_line()
        if len(block) > self.left_bytes:
            raise FarRefusal("nonsense", f"The instance sends more of {self._name!r} than it announced.")
        self.left_bytes -= len(block)
        self._take(block)

    def _read_line(self) -> None:
        self._has_line = True
        if refusal_in(bytes(self.line)) is not None:
            return
        piece = parse_message(Piece, bytes(self.line))
        if piece.offset != self._offset or piece.bytes > self._most:
            raise FarRefusal("nonsense", f"The instance sent another part of {piece.name!r} than requested.")
        self.left_bytes = piece.bytes


class Whole:
    """Receives a reply that begins with a line with its length and digest, and keeps the bytes that follow."""

    def __init__(self, most: int) -> None:
        self.line = bytearray()
        self._most = most
        self._content = bytearray()
        self._has_line = False

    def __call__(self, block: bytes) -> None:
        """Add the next block. Raise FarRefusal `nonsense` if more bytes arrive than are allowed."""
        if not self._has_line:
            head, newline, block = block.partition(b"\n")
            self.line += head
            self._has_line = bool(newline)
        self._content += block
        if len(self.line) > MOST_LINE_BYTES or len(self._content) > self._most:
            raise FarRefusal("nonsense", f"The instance sent more than {self._most:,} bytes.")

    def content(self) -> bytes:
        """Return the received bytes. Raise FarRefusal `nonsense` if their length or digest is not the announced one."""
        sized, content = parse_message(Sized, bytes(self.line)), bytes(self._content)
        if sized.bytes != len(content) or sized.sha256 != hashlib.sha256(content).hexdigest():
            raise FarRefusal("nonsense", "The instance's answer did not arrive complete.")
        return content


class Gets(Protocol):
    """The part of a `FarSide` that downloads need."""

    def ask(self, verb: str, *options: str, sink: Arriving, timeout_s: float) -> tuple[bytes, bytes]:
        """Call the agent once, and pass its reply to the sink."""
        ...


def fetch_part(far: Gets, name: str, offset: int, most: int, take: Take) -> None:
    """Request at most `most` bytes of a finished file from `offset`, and pass them to `take` as they arrive."""
    sink = Arriving(name, offset, most, take)
    options = ("--name", name, "--offset", str(offset), "--most", str(most))
    far.ask("get", *options, sink=sink, timeout_s=_PULL_S)
    if sink.left_bytes:
        raise FarRefusal("nonsense", f"The instance sends less of {name!r} than it announced.")
