"""Reads the rows of a JSON array or a table one by one: no row uses more memory than MOST_ROW_BYTES."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from gpurun.core.untrusted import Malformed, demand_few_members
from gpurun.data.packing import BLOCK_BYTES
from gpurun.data.refusals import MOST_ROW_BYTES, bad_row, not_utf8, too_long

_MOST_CELLS = 2_000_000
_CUT_CHARS, _MOST_BLOCK_BYTES = 32, 16 << 20
"""An error within so many characters of the buffer's end may only mean that more input must be read first."""
_SPACE = " \t\r\n"


class TableLines:
    """Feeds a table's lines to `csv`, which joins the lines of a quoted cell; UsageError if a row is too long."""

    def __init__(self, text: TextIO, path: Path, delimiter: str) -> None:
        self._text, self._path, self._delimiter = text, path, delimiter
        self._number = self._chars = self._cells = 0

    def begin_row(self) -> None:
        """Start a new row at the current line."""
        self._chars = self._cells = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(MOST_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self._number += 1
        self._chars += len(line)
        self._cells += line.count(self._delimiter)
        if self._chars > MOST_ROW_BYTES or self._cells > _MOST_CELLS:
            raise too_long(self._path, f"the row that ends after line {self._number}")
        return line


class _Text:
    """A decoded buffer of a stream; `at` is the reader's position in the buffer."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream, self._path, self._place = stream, path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.is_whole = "", 0, False

    def more(self) -> None:
        """Double the buffer, so that a long row is not parsed again for each block."""
        block = self._stream.read(min(max(BLOCK_BYTES, len(self.text) - self.at), _MOST_BLOCK_BYTES))
        before = len(self._decoder.getstate()[0])
        try:
            self.text, self.at = self.text[self.at :] + self._decoder.decode(block, final=not block), 0
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, error.object, error.start, self._place - before + error.start) from None
        self._place, self.is_whole = self._place + len(block), not block

    def next(self) -> str:
        """Return the next character that is not white space, without consuming it; "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text) or self.is_whole:
                return self.text[self.at : self.at + 1]
            self.more()


def members_of_array(stream: BinaryIO, path: Path) -> Iterator[Any]:
    """Yield the values of an array, parsed one by one; UsageError names a value that is invalid or too long."""
    text, number = _Text(stream, path), 0
    if text.next() != "[":
        raise bad_row(path, "its array", "it does not begin with [")
    text.at += 1
    while text.next() != "]" or number:
        yield _parse_value(text, path, number)
        number += 1
        sign = text.next()
        text.at += 1
        if sign == "]":
            break
        if sign != ",":
            raise bad_row(path, f"after object {number - 1}", "it is not JSON: a comma or the array's end is missing")
    else:
        text.at += 1
    if text.next():
        raise bad_row(path, "after its array", "it is not JSON: more text follows")


def _parse_value(text: _Text, path: Path, number: int) -> Any:
    where = f"object {number}"
    text.next()
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(text.text, text.at)
            if end - text.at > MOST_ROW_BYTES:
                raise too_long(path, where)
            if end < len(text.text) or text.is_whole:
                text.at = end
                return value
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos > len(text.text) - _CUT_CHARS
            if text.is_whole or not is_cut:
                raise bad_row(path, where, f"it is not JSON: {error.msg}") from None
        except RecursionError:
            raise bad_row(path, where, "it is nested too deeply") from None
        except ValueError:  # Python refuses a number of thousands of digits.
            raise bad_row(path, where, "it has a number that is too long") from None
        if len(text.text) - text.at > MOST_ROW_BYTES:
            raise too_long(path, where)
        text.more()
        try:
            demand_few_members(text.text)
        except Malformed as error:
            raise bad_row(path, where, str(error)) from None
