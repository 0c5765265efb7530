"""Reads the page headers of a Parquet column, before pyarrow allocates the memory that they declare.

A header is a struct in Thrift's compact protocol (parquet.thrift, PageHeader): field 2 is the unpacked size of the
page, field 3 its size in the file, and the struct of its kind (5, 7 or 8) begins with its number of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpurun.core.errors import UsageError

MOST_PAGE_BYTES = 256 << 20
"""The limit for a page, which is kept in memory as a whole; writers usually make pages of about 1 MB."""
_MOST_VALUES = 16 << 20
_HEAD_BYTES = (64 << 10, 16 << 20)
"""The bytes to read for a header: enough for nearly all; then as many as pyarrow reads, for long statistics."""
_BOOLS, _INTS, _BYTE, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), (4, 5, 6), 3, 7, 8, (9, 10), 12
_KINDS = (5, 7, 8)
_MOST_DEPTH = 8


@dataclass(frozen=True)
class _Page:
    """Sizes in bytes; `head_bytes` is the size of the header itself."""

    unpacked_bytes: int
    packed_bytes: int
    values: int
    head_bytes: int


def largest_page(path: Path, chunk: Any) -> int:
    """Return the largest unpacked page size of a column chunk; UsageError if it exceeds MOST_PAGE_BYTES.

    The search ends at a header that cannot be parsed; pyarrow will then report the error.
    """
    largest = 1
    with path.open("rb") as file:
        for page in _list_pages(file, chunk):
            if not 0 <= page.unpacked_bytes <= MOST_PAGE_BYTES or page.values > _MOST_VALUES:
                what = f"{path} has a page of {page.unpacked_bytes:,} bytes and {page.values:,} values, "
                what += f"but the limits are {MOST_PAGE_BYTES:,} and {_MOST_VALUES:,}."
                hint = "Write the file again with smaller pages (pyarrow's data_page_size), or leave it out."
                raise UsageError("data.page_too_large", what, hint=hint)
            largest = max(largest, page.unpacked_bytes)
    return largest


def _list_pages(file: BinaryIO, chunk: Any) -> Iterator[_Page]:
    starts = [chunk.data_page_offset, *([chunk.dictionary_page_offset] if chunk.has_dictionary_page else [])]
    place = min(start for start in starts if start is not None)
    stop = place + chunk.total_compressed_size
    while place < stop:
        page = _read_page_at(file, place)
        if page is None:
            return
        yield page
        place += page.head_bytes + max(0, page.packed_bytes)


def _read_page_at(file: BinaryIO, place: int) -> _Page | None:
    for most in _HEAD_BYTES:
        with suppress(IndexError, KeyError, ValueError):
            file.seek(place)
            return _parse_page(file.read(most))
    return None


def _parse_page(raw: bytes) -> _Page:
    fields, end = _parse_struct(raw, 0)
    values = max((fields[kind].get(1, 0) for kind in _KINDS if kind in fields), default=0)
    return _Page(fields[2], fields[3], values, end)


def _parse_struct(raw: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return a struct's numbers and structs, keyed by field id, and the offset of its end."""
    if depth > _MOST_DEPTH:
        raise ValueError("nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while head := raw[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _parse_int(raw, at)
        fields[number], at = _parse_value(raw, at, head & 15, depth)
    return fields, at + 1


def _parse_value(raw: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _BOOLS:
        return None, at
    if kind in _INTS:
        return _parse_int(raw, at)
    if kind == _STRUCT:
        return _parse_struct(raw, at, depth + 1)
    if kind in _LISTS:
        return None, _find_list_end(raw, at, depth)
    if kind == _BINARY:
        length, at = _parse_varint(raw, at)
        return None, at + length
    return None, at + {_BYTE: 1, _DOUBLE: 8}[kind]


def _find_list_end(raw: bytes, at: int, depth: int) -> int:
    count, kind, at = raw[at] >> 4, raw[at] & 15, at + 1
    if count == 15:
        count, at = _parse_varint(raw, at)
    for _ in range(count):
        at = at + 1 if kind in _BOOLS else _parse_value(raw, at, kind, depth + 1)[1]
    return at


def _parse_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = raw[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _parse_int(raw: bytes, at: int) -> tuple[int, int]:
    """Return a zigzag-encoded number, and the offset of its end."""
    value, at = _parse_varint(raw, at)
    return (value >> 1) ^ -(value & 1), at
