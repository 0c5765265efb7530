"""Receives many small files in one stream. The verified list says where each ends, so no archive is parsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gpurun.remote.interface import FarRefusal
from gpurun.remote.messages import MOST_GATHERED, MOST_LINE_BYTES, Gathered, ManifestFile, parse_message, refusal_in

SMALL_BYTES = 1 << 20
"""A file below this size is sent together with others, if there are at least LEAST_FILES of them."""
LEAST_FILES = 16
MOST_BYTES = 64 << 20
_GATHER_S = 300.0

# Receives a file, and its whole content.
TakeFile = Callable[[ManifestFile, bytes], None]


def group_files(files: Sequence[ManifestFile]) -> list[list[ManifestFile]]:
    """Divide the files into the groups in which they are sent."""
    found: list[list[ManifestFile]] = []
    size = 0
    for file in files:
        if not found or len(found[-1]) == MOST_GATHERED or size + file.bytes > MOST_BYTES:
            found.append([])
            size = 0
        found[-1].append(file)
        size += file.bytes
    return found


class Cutter:
    """Splits a stream into its files, and passes on each file once it is complete."""

    def __init__(self, files: Sequence[ManifestFile], take: TakeFile) -> None:
        self._files = files
        self._take = take
        self._place = 0
        self._held = bytearray()

    def __call__(self, block: bytes) -> None:
        """Add the next block. Raise FarRefusal `nonsense` if more arrives than the files have."""
        self._held += block
        while self._place < len(self._files) and len(self._held) >= self._files[self._place].bytes:
            file = self._files[self._place]
            content = bytes(self._held[: file.bytes])
            del self._held[: file.bytes]
            self._place += 1
            self._take(file, content)
        if self._place == len(self._files) and self._held:
            raise FarRefusal("nonsense", "More arrived than the requested files have.")

    @property
    def is_done(self) -> bool:
        """Return whether all files have arrived."""
        return self._place == len(self._files)


class Gathering:
    """Receives the reply to `gather`: keeps its first line, and then splits the stream into the files, in order."""

    def __init__(self, files: Sequence[ManifestFile], take: TakeFile) -> None:
        self.line = bytearray()
        self.left: tuple[int, ...] = ()
        self._files, self._take = files, take
        self.cutter: Cutter | None = None

    def __call__(self, block: bytes) -> None:
        """Add the next block. Raise FarRefusal `nonsense` for content that was not requested."""
        if self.cutter is None:
            head, newline, block = block.partition(b"\n")
            self.line += head
            if len(self.line) > MOST_LINE_BYTES:
                raise FarRefusal("nonsense", f"The instance sent {len(self.line)} bytes without a line end.")
            if not newline:
                return
            if refusal_in(bytes(self.line)) is not None:
                self.cutter = Cutter((), self._take)
                return
            reply = parse_message(Gathered, bytes(self.line))
            left = set(reply.left)
            coming = [file for place, file in enumerate(self._files) if place not in left]
            if reply.bytes != (total := sum(file.bytes for file in coming)):
                raise FarRefusal("nonsense", f"The instance announces {reply.bytes} bytes, but its files have {total}.")
            self.left, self.cutter = reply.left, Cutter(coming, self._take)
        self.cutter(block)


class Gathers(Protocol):
    """The part of a `FarSide` that this module needs."""

    def ask(self, verb: str, *, stdin: list[bytes], sink: Gathering, timeout_s: float) -> tuple[bytes, bytes]:
        """Call the agent once, and pass its reply to the sink."""
        ...


def fetch_small_files(far: Gathers, files: Sequence[ManifestFile], take: TakeFile) -> list[ManifestFile]:
    """Receive many files and pass each to `take`. Return those that are missing or changed on the machine."""
    sink = Gathering(files, take)
    names = "".join(f"{file.bytes} {file.name}\n" for file in files).encode("ascii")
    far.ask("gather", stdin=[names], sink=sink, timeout_s=_GATHER_S)
    if sink.cutter is None or not sink.cutter.is_done:
        raise FarRefusal("nonsense", "The instance sends less than it announced.")
    left = set(sink.left)
    return [file for place, file in enumerate(files) if place in left]
