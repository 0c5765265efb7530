"""The documents of a source: what is known of a file, which part of it is asked for, and the documents of that part.

A file of text is one document, or documents with `<|endoftext|>` between them; a larger one without is cut into pieces,
each of which can be held out, and none of which must be in memory with the others. A row is a document in itself.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

from gpurun.core.errors import UsageError
from gpurun.core.untrusted import Malformed, parse_json
from gpurun.data import parquet
from gpurun.data.bounded_rows import TableLines, members_of_array
from gpurun.data.kinds import HEAD_BYTES, delimiter_of
from gpurun.data.refusals import MOST_ROW_BYTES, bad_row, has_nul, no_column, not_utf8, too_long
from gpurun.data.streams import BLOCK_BYTES, lines_from, open_content

END, START = b"<|endoftext|>", "<|startoftext|>"
"""GPT-2's mark between documents, wherever in a text it stands, and the one that some put before each."""
Form = Literal["whole", "pieces", "separated", "lines", "array", "table", "parquet"]
"""How a file holds documents: it is one; it is cut into pieces; marks part them; the kinds of rows (kinds.py)."""
DIVISIBLE: tuple[Form, ...] = ("pieces", "separated", "lines", "parquet")
"""Files of which a task may read a part; the others are read whole."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text: its name within the source says where it lies (`part-3.parquet#1204`).

    `begins` is False for a piece of a text that goes on where the one before it ended. `url` is a row's, or "".
    """

    name: str
    text: str
    url: str = ""
    begins: bool = True


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: its name below the source's root, its size and time when it was looked at, and how it can be divided.

    `weights` are the bytes of text to be expected: of each row group of a Parquet file, else one number, the bytes of
    the (unpacked) content. There may be a million of them: none has a path of its own. `piece_bytes` is for "pieces".
    """

    name: str
    root: Path
    form: Form
    bytes: int
    modified_ns: int
    weights: tuple[int, ...]
    piece_bytes: int = 0

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.root / self.name

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of the whole file."""
        return sum(self.weights)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file: row groups of a Parquet file, else bytes of content; a document belongs to where it begins."""

    file: SourceFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of it."""
        if self.file.form == "parquet":
            return sum(self.file.weights[self.start : self.stop])
        return self.stop - self.start


def documents_of(spans: Iterable[Span], column: str) -> Iterator[Document]:
    """The documents of some spans in order, but blank ones. UsageError for whatever a source can have wrong with it."""
    readers = {
        "whole": _whole, "pieces": _pieces, "separated": _separated, "lines": _rows_of_lines, "array": _rows_of_array,
        "table": _rows_of_table, "parquet": _rows_of_parquet,
    }  # fmt: skip
    for span in spans:
        _demand_unchanged(span.file)
        for document in readers[span.file.form](span, column):
            if document.text and not document.text.isspace():
                yield document
        _demand_unchanged(span.file)


def _demand_unchanged(file: SourceFile) -> None:
    try:
        now = file.path.stat()
    except OSError as error:
        raise UsageError(
            "data.vanished",
            f"{file.path} was there when preparing began and is not any more: {error.strerror}.",
            hint="Bring it back as it was, its time too (cp -p); the same command then goes on where it stood.",
        ) from None
    if (now.st_size, now.st_mtime_ns) != (file.bytes, file.modified_ns):
        raise UsageError(
            "data.changed",
            f"{file.path} changed while it was being prepared: {file.bytes:,} bytes were there, now {now.st_size:,}.",
            hint="Prepare again into another folder once nothing writes to it, or from a copy.",
        )


def look_through(path: Path) -> tuple[int, bool]:
    """The bytes of a text's content, and whether marks part documents in it; UsageError for NUL and what is not UTF-8.

    Here it costs a moment. Later it would cost the work before it: a file that is mended then makes another source.
    """
    decoder, size, tail, is_separated = codecs.getincrementaldecoder("utf-8")(), 0, b"", False
    with open_content(path) as stream:
        while block := stream.read(BLOCK_BYTES):
            if b"\0" in block:
                raise has_nul(path, size + block.index(b"\0"))
            _demand_utf8(decoder, block, path, size)
            size, joined = size + len(block), tail + block
            is_separated, tail = is_separated or END in joined, joined[-len(END) + 1 :]
    _demand_utf8(decoder, b"", path, size)
    return size, is_separated


def _demand_utf8(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, place: int) -> None:
    """Refuse a block that begins at `place`, if with what came before it is no UTF-8; an empty one is the end."""
    place -= len(decoder.getstate()[0])
    try:
        decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.object[error.start], place + error.start) from None


def _whole(span: Span, _: str) -> Iterator[Document]:
    with open_content(span.file.path) as stream:
        yield Document(span.file.name, _text(span.file, 0, stream.read(span.stop)))


def _pieces(span: Span, _: str) -> Iterator[Document]:
    """Pieces of about `piece_bytes`, cut behind a line end, or else a space; the last goes on past the span's stop."""
    size, file = span.file.piece_bytes, span.file
    place, stop = (_cut_from(file, at) if at else 0 for at in (span.start, span.stop))
    with open_content(file.path, place) as stream:
        rest, begins = b"", True
        while place < stop:
            rest += stream.read(max(0, min(2 * size, stop - place) - len(rest)))
            is_last = place + len(rest) >= stop and len(rest) <= size + size // 2
            piece = rest if is_last else rest[: _cut(rest, size)]
            if not piece:
                return
            yield Document(f"{file.name}#{place}", _text(file, place, piece), begins=begins)
            place, rest, begins = place + len(piece), rest[len(piece) :], False


def _cut_from(file: SourceFile, place: int) -> int:
    """Where a text is cut at `place` or soon after: both tasks that meet there find the same."""
    with open_content(file.path, place) as stream:
        return place + _cut(stream.read(file.piece_bytes), 0)


def _cut(raw: bytes, least: int) -> int:
    """The first place from `least` on behind a line end, or else behind a space, or else before a character."""
    for gap in (b"\n", b" "):
        if place := raw.find(gap, least) + 1:
            return place
    return next((at for at in range(least, len(raw)) if raw[at] & 0xC0 != 0x80), len(raw))


def _separated(span: Span, _: str) -> Iterator[Document]:
    """A document belongs to the span in which the mark before it begins, and is read to its own end."""
    file, is_owned, place, held = span.file, span.start == 0, span.start, b""
    with open_content(file.path, place) as stream:
        while block := stream.read(BLOCK_BYTES):
            *ended, held = (held + block).split(END)
            if len(held) > MOST_ROW_BYTES and is_owned:
                raise too_long(file.path, f"text at offset {place:,}")
            for part in ended:
                if is_owned:
                    yield Document(f"{file.name}#{place}", _text(file, place, part))
                place += len(part)
                if place >= span.stop:
                    return
                is_owned, place = True, place + len(END)
            if not is_owned:
                if place >= span.stop:
                    return
                kept = held[-len(END) + 1 :]
                place, held = place + len(held) - len(kept), kept
    if is_owned:
        yield Document(f"{file.name}#{place}", _text(file, place, held))


def _text(file: SourceFile, place: int, raw: bytes) -> str:
    """A document's text: without byte-order mark and what is left of a mark's line, lines ending in \\n."""
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(file.path, raw[error.start], place + error.start) from None
    if file.form != "separated":
        return text
    text = text.lstrip(" \t").removeprefix("\n") if place else text
    return text.removeprefix(START).removeprefix("\n") if text.startswith(START) else text


def _rows_of_lines(span: Span, column: str) -> Iterator[Document]:
    file = span.file
    with open_content(file.path, max(0, span.start - 1)) as stream:
        for place, line in lines_from(stream, file.path, span.start, span.stop):
            if line.strip():
                yield from _of_row(file, f"line at offset {place:,}", str(place), _parsed(file, place, line), column)


def _parsed(file: SourceFile, place: int, line: bytes) -> Any:
    try:
        return parse_json(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise not_utf8(file.path, line[error.start], place + error.start) from None
    except Malformed as error:
        raise bad_row(file.path, f"line at offset {place:,}", str(error)) from None


def _rows_of_array(span: Span, column: str) -> Iterator[Document]:
    """One array: where a row begins is known only once all before it were read."""
    file = span.file
    with open_content(file.path) as stream:
        for number, row in enumerate(members_of_array(stream, file.path)):
            yield from _of_row(file, f"object {number}", str(number), row, column)


def _rows_of_table(span: Span, column: str) -> Iterator[Document]:
    """CSV or TSV with a head: it may have line ends within quotes, so that no part of it can be read alone."""
    csv.field_size_limit(MOST_ROW_BYTES)
    file = span.file
    with open_content(file.path) as stream:
        head = stream.read(HEAD_BYTES)
    delimiter = delimiter_of(head.removeprefix(codecs.BOM_UTF8), is_whole=len(head) < HEAD_BYTES)
    with open_content(file.path) as stream:
        lines = TableLines(TextIOWrapper(stream, "utf-8-sig", newline=""), file.path, delimiter)
        rows = csv.DictReader(lines, delimiter=delimiter)
        try:
            for number, row in enumerate(rows):
                lines.begin_row()
                yield from _of_row(file, f"row {number}", str(number), row, column)
        except UnicodeDecodeError as error:
            raise bad_row(file.path, f"after row {rows.line_num}", f"it is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise bad_row(file.path, f"line {rows.line_num}", str(error)) from None


def _rows_of_parquet(span: Span, column: str) -> Iterator[Document]:
    for number, text, url in parquet.rows(span.file.path, range(span.start, span.stop), column):
        yield from _parted(Document(f"{span.file.name}#{number}", text, url))


def _of_row(file: SourceFile, where: str, number: str, row: Any, column: str) -> Iterator[Document]:
    """The documents of a row that is an object; one whose text is null has none."""
    if not isinstance(row, dict):
        raise bad_row(file.path, where, f"it is {type(row).__name__}, not an object")
    if column not in row:
        raise no_column(file.path, column, sorted(map(str, row)), "key")
    text, url = row[column], row.get("url")
    if text is not None and not isinstance(text, str):
        raise bad_row(file.path, where, f"it has {type(text).__name__} under {column!r}, which is no text")
    if text:
        yield from _parted(Document(f"{file.name}#{number}", mended(text), mended(url) if isinstance(url, str) else ""))


def _parted(document: Document) -> Iterator[Document]:
    """A row whose text has marks within it is several documents, or one with a mark to be left out."""
    mark = END.decode()
    if mark not in document.text:
        yield document
        return
    for part in document.text.split(mark):
        yield replace(document, text=part.lstrip("\n").removeprefix(START))


def mended(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON can spell and no UTF-8 has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
