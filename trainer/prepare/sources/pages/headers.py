"""The headers of the pages of a column chunk: Thrift's compact protocol, as the Parquet format has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.prepare.sources.pages.part import varint

__all__ = ["Page", "pages"]

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_ABOUT = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""The field that tells more of each kind of page."""
_ENCODINGS = {0: "PLAIN", 2: "RLE_DICTIONARY", 3: "RLE", 8: "RLE_DICTIONARY"}
_TRUE, _FALSE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 7, 8, 9, 10, 12
_WHOLE_NUMBERS = (3, 4, 5, 6)


@dataclass(frozen=True)
class Page:
    """A page of a column chunk: its body lies at byte `place` of the file."""

    is_dictionary: bool
    place: int
    packed_bytes: int
    unpacked_bytes: int
    values: int
    """Nulls among them."""
    encoding: str
    """PLAIN, RLE_DICTIONARY, or "" for one that is not known here."""
    level_encoding: str
    level_bytes: int | None
    """How long the levels are that precede the values of a page of the second version; None in the first."""
    is_packed: bool


def pages(file: BinaryIO, start: int, values: int) -> Iterator[Page]:
    """The pages of a column chunk of so many values that begins at byte `start`; index pages are left out.

    Raises EOFError where the file is not made of such pages.
    """
    while values > 0:
        file.seek(start)
        header = _struct(file)
        place, packed_bytes = file.tell(), _count(header, 3)
        if _count(header, 1) in _ABOUT:
            page = _page(header, place, packed_bytes)
            values -= 0 if page.is_dictionary else page.values
            if values < 0:
                raise EOFError("a page of more values than its column has")
            yield page
        start = place + packed_bytes


def _page(header: dict[int, Any], place: int, packed_bytes: int) -> Page:
    kind = header[1]
    is_second = kind == _DATA_V2
    about = header.get(_ABOUT[kind])
    if not isinstance(about, dict):
        raise EOFError("a page that does not say what it is")
    return Page(
        is_dictionary=kind == _DICTIONARY,
        place=place,
        packed_bytes=packed_bytes,
        unpacked_bytes=_count(header, 2),
        values=_count(about, 1),
        encoding=_ENCODINGS.get(_count(about, 4 if is_second else 2), ""),
        level_encoding=_ENCODINGS.get(_count(about, 3), "") if kind == _DATA else "RLE",
        level_bytes=_count(about, 5) + _count(about, 6) if is_second else None,
        is_packed=bool(about.get(7, True)) if is_second else True,
    )


def _count(fields: dict[int, Any], number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or value < 0:
        raise EOFError("a page's header without one of its numbers")
    return value


def _struct(file: BinaryIO) -> dict[int, Any]:
    """A struct by its fields' numbers. Texts are passed over: a statistic can be as long as a document."""
    fields: dict[int, Any] = {}
    number = 0
    while byte := _byte(file):
        number = number + (byte >> 4) if byte >> 4 else _signed(file)
        fields[number] = _field(file, byte & 15)
    return fields


def _field(file: BinaryIO, kind: int) -> Any:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE
    if kind in _WHOLE_NUMBERS:
        return _signed(file)
    if kind == _STRUCT:
        return _struct(file)
    if kind in (_LIST, _SET):
        byte = _byte(file)
        return [_field(file, byte & 15) for _ in range(byte >> 4 if byte >> 4 < 15 else varint(file))]
    if kind not in (_DOUBLE, _BINARY):
        raise EOFError(f"a field of an unknown kind, {kind}, in a page's header")
    file.seek(8 if kind == _DOUBLE else varint(file), 1)
    return None


def _signed(file: BinaryIO) -> int:
    number = varint(file)
    return number >> 1 ^ -(number & 1)


def _byte(file: BinaryIO) -> int:
    byte = file.read(1)
    if not byte:
        raise EOFError("the file ends in a page's header")
    return byte[0]
