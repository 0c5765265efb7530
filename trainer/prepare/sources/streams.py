"""Plain, gzip and zstd files as bytes from any place on; one that is cut short is a refusal, never a shorter file."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from trainer.prepare.errors import Refusal, unreadable

__all__ = [
    "PIECE_BYTES",
    "content_bytes",
    "is_packed",
    "line_start",
    "lines_from",
    "open_content",
    "regrouped",
    "whole_characters",
]

PIECE_BYTES = 1 << 20
"""A longer document comes in pieces of about so much: memory must not depend on what a source holds."""
_BLOCK_BYTES = 1 << 20
_PACKED_BLOCK_BYTES = 1 << 15
"""What is unpacked at once: a block of zstd can grow a thousandfold."""


def is_packed(path: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return path.suffix.lower() in (".gz", ".zst")


@contextlib.contextmanager
def open_content(path: Path, start: int = 0) -> Iterator[BinaryIO]:
    """The content of a file from byte `start` on, unpacked. A packed file has no other way there than to unpack.

    Raises Refusal for what cannot be read or is damaged, also while the stream is read within the context.
    """
    try:
        with _opened(path) as stream:
            if not is_packed(path):
                stream.seek(start)
            while start > 0 and is_packed(path):
                skipped = len(stream.read(min(start, _BLOCK_BYTES)))
                if not skipped:
                    break
                start -= skipped
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Refusal(
            "data.cut_short",
            f"{path} is damaged or cut short: {str(error).rstrip('.')} ({path.stat().st_size:,} bytes are there).",
            hint="Download or copy that file again, and compare its size with the original's.",
        ) from None
    except OSError as error:
        if error.filename is not None and Path(error.filename) != path:
            raise
        raise unreadable(path, error) from None


def content_bytes(path: Path) -> int:
    """How long the unpacked content is; a packed file is unpacked for it once, so a damaged one shows here."""
    if not is_packed(path):
        return path.stat().st_size
    with open_content(path) as stream:
        return sum(iter(lambda: len(stream.read(_BLOCK_BYTES)), 0))


def lines_from(stream: BinaryIO, start: int, stop: int, most: int) -> Iterator[tuple[int, bytes]]:
    """(place, line) of the lines that begin in [start, stop); the stream stands at max(0, start - 1).

    A line longer than `most` bytes comes in several parts, all but the last without a line end.
    """
    place = line_start(stream, start, most)
    begins = True
    while (place < stop or not begins) and (line := stream.readline(most)):
        yield place, line
        place += len(line)
        begins = line.endswith(b"\n")


def line_start(stream: BinaryIO, start: int, most: int) -> int:
    """Where the first line begins from `start` on; the stream stands at max(0, start - 1), and then at that line."""
    if start == 0:
        return 0
    place = start - 1
    while (skipped := stream.readline(most)) and not skipped.endswith(b"\n"):
        place += len(skipped)
    return place + len(skipped)


def whole_characters(raw: bytes) -> tuple[bytes, bytes]:
    """Cut off the beginning of a character that the bytes do not hold whole: one has at most four bytes."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (raw[:-back], raw[-back:]) if length > back else (raw, b"")
        if byte < 0x80:
            break
    return raw, b""


def regrouped(texts: Iterable[str], most: int) -> Iterator[str]:
    """The same text in pieces of `most` bytes of UTF-8, whole characters: where it is cut depends on the text alone."""
    rest = b""
    for text in texts:
        rest += text.encode("utf-8")
        while len(rest) >= most:
            piece, _ = whole_characters(rest[:most])
            yield piece.decode("utf-8")
            rest = rest[len(piece) :]
    if rest:
        yield rest.decode("utf-8")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    elif path.suffix.lower() == ".zst":
        with open(path, "rb") as file, io.BufferedReader(_ZstdReader(file), _BLOCK_BYTES) as unpacked:
            yield unpacked
    else:
        with open(path, "rb") as file:
            yield file


def _too_wide(path: str) -> Refusal:
    return Refusal(
        "data.window_too_large",
        f"{path} is packed with a window of more than 128 MB (zstd --long), which unpacking would hold in memory.",
        hint="Pack it again: zstd -d --long=31 --stdout FILE.zst | zstd -o OTHER.zst",
    )


class _ZstdReader(io.RawIOBase):
    """Zstd frames, one after the other, as one stream. zstandard's own reader takes a cut file for a shorter one."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file, self._new, self._error = file, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame = self._new()
        self._fresh, self._ready = True, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            raw = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._fresh = self._new(), True
            raw = raw or self._file.read(_PACKED_BLOCK_BYTES)
            if not raw:
                if self._fresh:
                    return 0
                raise EOFError("the last zstd frame has no end")
            try:
                self._ready, self._fresh = memoryview(self._frame.decompress(raw)), False
            except self._error as error:
                if "too much memory" in str(error):
                    raise _too_wide(self._file.name) from None
                raise EOFError(str(error)) from None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
