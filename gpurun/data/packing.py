"""Unpacks a file while it is read (gzip, bzip2, xz, zstd), and refuses a truncated file."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from gpurun.core.errors import UsageError
from gpurun.data.refusals import unreadable

BLOCK_BYTES = 1 << 20
MAGIC_BYTES = 6
_PACKED_BLOCK_BYTES = 1 << 10
"""The packed bytes that one call unpacks; the output can be thirty thousand times as large."""
_MOST_WINDOW_BYTES = 160 << 20
"""The memory limit for unpacking xz, whose largest usual window is 64 MB."""
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz"}
SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
"""The usual suffix of each packing, which follows the name of the unpacked file."""


def packing_of(head: bytes) -> str:
    """Return how a file is packed, from its first bytes: a value of SUFFIXES, or ""."""
    if head[:3] == b"BZh" and head[3:4].isdigit():  # A text may begin with BZh1: the first block must follow.
        return "bzip2" if head[4:6] in (b"1A", b"\x17r") else ""
    return next((how for magic, how in _MAGIC.items() if head.startswith(magic)), "")


@contextlib.contextmanager
def unpack_content(raw: BinaryIO, how: str) -> Iterator[BinaryIO]:
    """Yield the unpacked content, or the file itself; `naming_faults` translates its errors."""
    if not how:
        yield raw
    elif how == "gzip":
        with gzip.open(raw, "rb") as stream:
            yield cast(BinaryIO, stream)
    else:
        with io.BufferedReader(_Unpacked(raw, _choose_format(how)), BLOCK_BYTES) as stream:
            yield stream


@contextlib.contextmanager
def naming_faults(path: Path) -> Iterator[None]:
    """Turn errors of a packed file into a UsageError that names the file."""
    try:
        yield
    except gzip.BadGzipFile as error:
        if "Not a gzipped file" not in str(error):
            raise cut_short(path, str(error)) from None
        raise _bytes_behind_error(path, "gzip") from None
    except _BytesBehind as error:
        raise _bytes_behind_error(path, str(error)) from None
    except _TooWide as error:
        raise _too_wide_error(path, str(error)) from None
    except (EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise cut_short(path, str(error)) from None
    except OSError as error:
        if error.filename is not None and Path(error.filename) != path:
            raise
        raise unreadable(path, error) from None


def cut_short(path: Path, why: str) -> UsageError:
    """Return the error for a damaged or truncated file."""
    size = f" ({path.stat().st_size:,} bytes)" if path.is_file() else ""
    return UsageError(
        "data.cut_short",
        f"{path} is damaged or cut short: {why.rstrip('.')}{size}.",
        hint="Download or copy the file again, and compare its size with the original's.",
    )


def _bytes_behind_error(path: Path, how: str) -> UsageError:
    tool = {"gzip": "gunzip", "bzip2": "bunzip2"}.get(how, f"un{how}")
    return UsageError(
        "data.bytes_behind",
        f"{path} has unknown bytes after the end of its {how} content.",
        hint=f"Two files may have been joined, or a download resumed wrongly; {tool} shows the place.",
    )


def _too_wide_error(path: Path, how: str) -> UsageError:
    again = {
        "zstd": "zstd -d --long=31 --stdout FILE.zst | zstd -o OTHER.zst",
        "xz": "xz -d --stdout FILE.xz | xz > OTHER.xz",
    }[how]
    return UsageError(
        "data.window_too_large",
        f"{path} is packed with a window of more than 128 MB ({how}), which would have to be kept in memory.",
        hint=f"Pack it again: {again}",
    )


class _BytesBehind(Exception):
    """Unknown bytes follow the content of a packed file; the text of the error is the packing."""


class _TooWide(Exception):
    """Unpacking would use too much memory; the text of the error is the packing."""


class _Format(NamedTuple):
    """The decompressor for one stream or frame, its library's error, and the padding allowed between two streams."""

    name: str
    new: Callable[[], Any]
    error: type[Exception]
    padding: bytes = b""


def _choose_format(how: str) -> _Format:
    if how == "bzip2":
        return _Format(how, bz2.BZ2Decompressor, OSError)
    if how == "xz":
        new = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_MOST_WINDOW_BYTES)
        return _Format(how, new, lzma.LZMAError, padding=b"\0")
    import zstandard

    return _Format(how, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)


class _Unpacked(io.RawIOBase):
    """The unpacked, joined streams of one format; unlike the libraries' own readers, it detects a truncated file."""

    def __init__(self, file: BinaryIO, form: _Format) -> None:
        self._file, self._format = file, form
        self._frame, self._frames = form.new(), 0
        self._fresh, self._ready = True, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            raw = b""
            if self._frame.eof:
                raw, self._frame, self._fresh = self._frame.unused_data, self._format.new(), True
                self._frames += 1
            raw = raw or self._file.read(_PACKED_BLOCK_BYTES)
            if not raw:
                if self._fresh:
                    return 0
                raise EOFError(f"the last {self._format.name} frame has no end")
            if self._fresh and self._frames:
                raw = raw.lstrip(self._format.padding)
            if raw:
                self._ready, self._fresh = memoryview(self._unpack(raw)), False
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _unpack(self, raw: bytes) -> bytes:
        try:
            return bytes(self._frame.decompress(raw))
        except self._format.error as error:
            words = str(error) or "its content is damaged"
            if "too much memory" in words or "Memory usage limit" in words:
                raise _TooWide(self._format.name) from None
            if self._fresh and self._frames and self._format.name != "zstd":
                raise _BytesBehind(self._format.name) from None
            raise EOFError(words) from None
