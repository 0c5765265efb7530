"""The values of a column of text, one after the other, each read in parts."""

from __future__ import annotations

import contextlib
import io
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import BinaryIO

from trainer.prepare.sources.pages.codecs import CODECS, Unpacked, unpacked
from trainer.prepare.sources.pages.headers import Page, pages
from trainer.prepare.sources.pages.part import Part, Source, varint

__all__ = ["Chunk", "is_known", "largest_page", "values"]

_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Chunk:
    """A column of one row group: a flat one of byte arrays, as pyarrow's metadata tell of it."""

    start: int
    values: int
    codec: str
    has_nulls: bool
    """Whether it may have; then each page says of every row whether it has a value."""


def largest_page(file: BinaryIO, chunk: Chunk) -> int:
    """The bytes of the largest page once it is unpacked; only headers are read."""
    return max((page.unpacked_bytes for page in pages(file, chunk.start, chunk.values)), default=0)


def is_known(file: BinaryIO, chunk: Chunk) -> bool:
    """Whether `values` reads this: LZ4 and the delta encodings, which few writers take, are left to pyarrow."""
    found = pages(file, chunk.start, chunk.values)
    return chunk.codec in CODECS and all(page.encoding and page.level_encoding == "RLE" for page in found)


def values(file: BinaryIO, chunk: Chunk, folder: Path | None) -> Iterator[Source | None]:
    """Each row's value, None for null; it can be read until the next is asked for.

    What a dictionary holds is kept in a file without a name in `folder` (None: where temporary files are). Raises
    EOFError for damaged pages.
    """
    dictionary: _Dictionary | None = None
    with contextlib.ExitStack() as files:
        for page in pages(file, chunk.start, chunk.values):
            stream, present = _opened(file, chunk, page)
            if page.is_dictionary:
                dictionary = _Dictionary(stream, files.enter_context(_kept_in(folder)))
                continue
            given = _plain(stream) if page.encoding == "PLAIN" else _by_number(stream, dictionary)
            for is_there in islice(present, page.values):
                yield next(given) if is_there else None


def _kept_in(folder: Path | None) -> io.FileIO:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _opened(file: BinaryIO, chunk: Chunk, page: Page) -> tuple[Unpacked, Iterator[int]]:
    """A page's values, and of each row whether it has one."""
    before = page.level_bytes or 0
    raw = Part(file.fileno(), page.place, before).read(before)
    body = Part(file.fileno(), page.place + before, page.packed_bytes - before)
    stream = unpacked(body, chunk.codec if page.is_packed else "UNCOMPRESSED")
    if page.is_dictionary or not chunk.has_nulls:
        return stream, repeat(1)
    if page.level_bytes is None:
        raw = stream.read(_number(stream))
    return stream, _runs(Unpacked(iter([raw])), 1)


def _plain(stream: Unpacked) -> Iterator[Source]:
    while True:
        value = _Ahead(stream, _number(stream))
        yield value
        value.pass_over()


class _Ahead:
    """The next so many bytes of a page."""

    def __init__(self, stream: Unpacked, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, size: int) -> bytes:
        size = min(size, self._left)
        self._left -= size
        return self._stream.read(size)

    def pass_over(self) -> None:
        while self._left:
            self.read(_BLOCK_BYTES)


class _Dictionary:
    """The values that a column's rows name by number: unpacked as far as a row asked, since they stand as they came."""

    def __init__(self, stream: Unpacked, kept: io.FileIO) -> None:
        self._stream, self._kept, self._ends = stream, kept, array("Q", [0])

    def value(self, number: int) -> Source:
        while len(self._ends) < number + 2:
            self._keep(_number(self._stream))
        start = self._ends[number]
        return Part(self._kept.fileno(), start, self._ends[number + 1] - start)

    def _keep(self, size: int) -> None:
        self._ends.append(self._ends[-1] + size)
        while size:
            block = memoryview(self._stream.read(min(size, _BLOCK_BYTES)))
            size -= len(block)
            while block:
                block = block[self._kept.write(block) :]


def _by_number(stream: Unpacked, dictionary: _Dictionary | None) -> Iterator[Source]:
    if dictionary is None:
        raise EOFError("a page's values stand in a dictionary that is not there")
    for number in _runs(stream, stream.read(1)[0]):
        yield dictionary.value(number)


def _runs(stream: Unpacked, width: int) -> Iterator[int]:
    """Numbers of `width` bits without an end, repeated or packed in eights: Parquet's hybrid of runs and bits."""
    mask = (1 << width) - 1
    while True:
        header = varint(stream)
        if header & 1:
            for _ in range(header >> 1):
                bits = int.from_bytes(stream.read(width), "little")
                yield from [bits >> place * width & mask for place in range(8)]
        else:
            yield from repeat(int.from_bytes(stream.read((width + 7) // 8), "little"), header >> 1)


def _number(stream: Unpacked) -> int:
    return int.from_bytes(stream.read(4), "little")
