"""Reads the bytes of a file from any offset, also if the file is packed or inside an archive."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import BinaryIO, cast

from gpurun.data.archive_members import member_of, opened_member
from gpurun.data.packing import BLOCK_BYTES, MAGIC_BYTES, SUFFIXES, naming_faults, packing_of, unpack_content
from gpurun.data.refusals import MOST_ROW_BYTES, too_long


def plain_name(path: PurePath) -> str:
    """Return a file's name in lower case, without the suffix of a packed file."""
    name = path.name.lower()
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


@contextlib.contextmanager
def open_content(path: Path, start: int = 0) -> Iterator[BinaryIO]:
    """Open a file's unpacked content at byte `start`; a packed file is unpacked up to there.

    The path of a file in an archive is the archive's path followed by the member's name. UsageError, also while the
    stream is read, if the file is unreadable or damaged.
    """
    with naming_faults(path), _open_and_detect(path) as (raw, how), unpack_content(raw, how) as stream:
        if start and not how and stream.seekable():
            stream.seek(start)
            start = 0
        while start > 0:
            skipped = len(stream.read(min(start, BLOCK_BYTES)))
            if not skipped:
                break
            start -= skipped
        yield stream


def packing(path: Path) -> str:
    """Return how a file is packed, from its first bytes: "gzip", "zstd", "xz", "bzip2" or ""."""
    with naming_faults(path), _open_and_detect(path) as (_, how):
        return how


@contextlib.contextmanager
def open_raw(path: Path) -> Iterator[BinaryIO]:
    """Open a file without unpacking it, in an archive or not."""
    with naming_faults(path), _open_and_detect(path) as (raw, _):
        yield raw


@contextlib.contextmanager
def _open_and_detect(path: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open a file without unpacking it, and return how it is packed."""
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115
    except NotADirectoryError:
        file = opened_member(path)
    with file:
        yield file, packing_of(cast(io.BufferedReader, file).peek(MAGIC_BYTES)[:MAGIC_BYTES])


def size_and_time(path: Path) -> tuple[int, int]:
    """Return a file's size in bytes as stored, and its modification time; a member has its archive's time."""
    try:
        about = path.stat()
    except NotADirectoryError:
        archive, member = member_of(path)
        return member.bytes, archive.stat().st_mtime_ns
    return about.st_size, about.st_mtime_ns


def content_bytes(path: Path) -> int:
    """Return the length of the unpacked content; a packed file is unpacked for this, which also detects damage."""
    if not packing(path):
        return size_and_time(path)[0]
    with open_content(path) as stream:
        return sum(iter(lambda: len(stream.read(BLOCK_BYTES)), 0))


def lines_from(stream: BinaryIO, path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) for each line that begins in [start, stop); the stream must be at max(0, start - 1).

    UsageError for a line that is longer than a row may be.
    """
    place = start
    if start:  # The previous line belongs to another task, however long it is.
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
