"""Plain, gzip and zstd files as bytes from any place on; one that is cut short is refused, never a shorter file."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from gpurun.core.errors import UsageError
from gpurun.data.refusals import MOST_ROW_BYTES, too_long, unreadable

BLOCK_BYTES = 1 << 20
_PACKED_BLOCK_BYTES = 1 << 10
"""What is unpacked at once: a block of zstd can grow thirty thousandfold."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def packing(path: Path) -> str:
    """How a file is packed, by its first bytes: "gzip", "zstd" or ""."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise unreadable(path, error) from None
    return "gzip" if head[:2] == _GZIP else "zstd" if head == _ZSTD else ""


@contextlib.contextmanager
def open_content(path: Path, start: int = 0) -> Iterator[BinaryIO]:
    """The content of a file from byte `start` on, unpacked. A packed file has no other way there than to unpack.

    Raises UsageError for what cannot be read or is damaged, also while the stream is read within the context.
    """
    try:
        how = packing(path)
        with _opened(path, how) as stream:
            if not how:
                stream.seek(start)
            while how and start > 0:
                skipped = len(stream.read(min(start, BLOCK_BYTES)))
                if not skipped:
                    break
                start -= skipped
            yield stream
    except gzip.BadGzipFile as error:
        if "Not a gzipped file" not in str(error):
            raise _cut_short(path, error) from None
        raise UsageError(
            "data.bytes_behind",
            f"{path} has other bytes behind the end of its gzip content.",
            hint="Two files may have been joined, or a download went on: unpack it with gunzip, which names the place.",
        ) from None
    except (EOFError, zlib.error) as error:
        raise _cut_short(path, error) from None
    except OSError as error:
        if error.filename is not None and Path(error.filename) != path:
            raise
        raise unreadable(path, error) from None


def _cut_short(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "data.cut_short",
        f"{path} is damaged or cut short: {str(error).rstrip('.')} ({path.stat().st_size:,} bytes are there).",
        hint="Download or copy that file again, and compare its size with the original's.",
    )


def content_bytes(path: Path) -> int:
    """How long the unpacked content is; a packed file is unpacked for it once, so a damaged one shows here."""
    if not packing(path):
        return path.stat().st_size
    with open_content(path) as stream:
        return sum(iter(lambda: len(stream.read(BLOCK_BYTES)), 0))


def lines_from(stream: BinaryIO, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(place, line) of the lines that begin in [start, stop); the stream stands at max(0, start - 1).

    UsageError for one that is longer than a row may be.
    """
    place = start
    if start:  # The line before it is that of another task, however long it is.
        place -= 1
        while part := stream.readline(BLOCK_BYTES):
            place += len(part)
            if part.endswith(b"\n"):
                break
    while place < stop and (line := stream.readline(MOST_ROW_BYTES + 1)):
        if len(line) > MOST_ROW_BYTES:
            raise too_long(path, f"line at offset {place:,}")
        yield place, line
        place += len(line)


@contextlib.contextmanager
def _opened(path: Path, how: str) -> Iterator[BinaryIO]:
    if how == "gzip":
        with gzip.open(path, "rb") as stream:
            yield cast(BinaryIO, stream)
    elif how == "zstd":
        with open(path, "rb") as file, io.BufferedReader(_ZstdReader(file), BLOCK_BYTES) as unpacked:
            yield unpacked
    else:
        with open(path, "rb") as file:
            yield file


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


def _too_wide(path: str) -> UsageError:
    return UsageError(
        "data.window_too_large",
        f"{path} is packed with a window of more than 128 MB (zstd --long), which unpacking would hold in memory.",
        hint="Pack it again: zstd -d --long=31 --stdout FILE.zst | zstd -o OTHER.zst",
    )
