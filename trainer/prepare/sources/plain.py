"""Text files, cut into documents as they stream.

A file is one document, unless it has separator lines (`<|endoftext|>`, alone on a line): then those stand between its
documents. The documents of one large file without separators are blocks of it, cut at line ends: so that a share of it
can be held out, and so that none of it must be in memory whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from trainer.prepare.errors import not_utf8
from trainer.prepare.sources.files import SourceFile, Span
from trainer.prepare.sources.streams import (
    PIECE_BYTES,
    is_packed,
    line_start,
    lines_from,
    open_content,
    whole_characters,
)
from trainer.prepare.texts import Text

__all__ = ["SEPARATOR", "WHOLE_BYTES", "documents", "look_through"]

SEPARATOR = b"<|endoftext|>"
WHOLE_BYTES = 16 << 20
"""A larger file of a folder is cut into blocks too."""
BLOCK_BYTES = 64 << 10
"""Of a large file without separators, what counts as one document: about 16 thousand tokens."""
_LOOK_BYTES = 256 << 10


def look_through(path: Path) -> tuple[int, bool]:
    """The bytes of a file's content, and whether a separator line is anywhere in it; what is not UTF-8 is a Refusal.

    Here it costs a moment. Later it would cost the work before it: a file that is mended then makes another source.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    size, line, separated = 0, b"", False
    with open_content(path) as stream:
        while block := stream.read(_LOOK_BYTES):
            _demand_utf8(decoder, block, path, size)
            raw = block if size else block.removeprefix(codecs.BOM_UTF8)
            size += len(block)
            if not separated:
                separated, line = _separator_in(line + raw)
    _demand_utf8(decoder, b"", path, size)
    return (size if is_packed(path) else path.stat().st_size), separated or line.strip() == SEPARATOR


def _demand_utf8(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, place: int) -> None:
    """Refuse a block that begins at `place`, if with what came before it is no UTF-8; an empty one is the end."""
    place -= len(decoder.getstate()[0])
    try:
        decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.object[error.start], place + error.start) from None


def _separator_in(raw: bytes) -> tuple[bool, bytes]:
    """Whether one of the lines that end here is a separator; the beginning of the one that does not."""
    stop = raw.rfind(b"\n") + 1
    # Few blocks have the word at all, and to look for it costs little.
    found = SEPARATOR in raw and any(line.strip() == SEPARATOR for line in raw[:stop].split(b"\n"))
    # What is longer than a block is no separator, and need not be kept.
    return found, raw[stop:] if len(raw) - stop <= _LOOK_BYTES else b"-"


def documents(span: Span) -> Iterator[Text]:
    """The documents that begin within a span of a text file, without byte-order mark, lines ending in \\n."""
    if span.file.form == "whole":
        yield from _whole(span)
    elif span.file.form == "separated":
        yield from _separated(span)
    else:
        yield from _blocks(span)


def _separated(span: Span) -> Iterator[Text]:
    """A document belongs to the span in which the separator before it begins, and is read to its own end."""
    document = _Document(span.file)
    owned = span.start == 0
    with open_content(span.file.path, max(0, span.start - 1)) as stream:
        for place, line in lines_from(stream, span.start, span.file.weights[0], PIECE_BYTES):
            if (line if place else line.removeprefix(codecs.BOM_UTF8)).strip() == SEPARATOR:
                yield from document.ended()
                owned = place < span.stop
            elif owned:
                yield from document.goes_on(place, line)
            if not owned and place >= span.stop:
                return
    yield from document.ended()


class _Document:
    """Collects the lines of one document, and gives out what is long enough already."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._lines: list[bytes] = []
        self._size = self._place = 0
        self._continues = False

    def goes_on(self, place: int, line: bytes) -> Iterator[Text]:
        """Another line of it, which begins at `place`."""
        self._place = self._place if self._lines else place
        self._lines.append(line)
        self._size += len(line)
        if self._size >= PIECE_BYTES:
            whole, rest = _cut(b"".join(self._lines))
            yield _text(self._file, self._place, whole, continues=self._continues)
            self._place += len(whole)
            self._lines, self._size, self._continues = [rest] if rest else [], len(rest), True

    def ended(self) -> Iterator[Text]:
        """What is left of it; the next line is another document's."""
        if self._lines:
            yield _text(self._file, self._place, b"".join(self._lines), continues=self._continues)
        self._lines, self._size, self._continues = [], 0, False


def _blocks(span: Span) -> Iterator[Text]:
    """Blocks of whole lines; a line without an end for that long is cut between two characters."""
    with open_content(span.file.path, max(0, span.start - 1)) as stream:
        place = line_start(stream, span.start, BLOCK_BYTES)
        rest, begins = b"", True
        while place < span.stop or not begins:
            raw = rest + stream.read(max(1, min(BLOCK_BYTES, span.stop - place) - len(rest)))
            if not raw.endswith(b"\n"):
                raw += stream.readline(BLOCK_BYTES)
            if len(raw) == len(rest):
                break
            begins = raw.endswith(b"\n")
            raw, rest = (raw, b"") if begins else _cut(raw)
            yield _text(span.file, place, raw)
            place += len(raw)
        if rest:
            yield _text(span.file, place, rest)


def _whole(span: Span) -> Iterator[Text]:
    place, rest = 0, b""
    with open_content(span.file.path) as stream:
        while block := stream.read(PIECE_BYTES):
            raw, rest = _cut(rest + block)
            yield _text(span.file, place, raw, continues=place > 0)
            place += len(raw)
    if rest:
        yield _text(span.file, place, rest, continues=place > 0)


def _cut(raw: bytes) -> tuple[bytes, bytes]:
    """Cut off what may belong to the next bytes: of a character, or of a line end."""
    whole, part = whole_characters(raw)
    return (whole[:-1], b"\r" + part) if whole.endswith(b"\r") else (whole, part)


def _text(file: SourceFile, place: int, raw: bytes, *, continues: bool = False) -> Text:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file.path, raw[error.start], place + error.start) from None
    name = file.name if file.form == "whole" else f"{file.name}#{place}"
    return Text(name, text.removeprefix("\ufeff").replace("\r\n", "\n"), continues=continues)
