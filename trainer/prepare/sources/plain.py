"""Text files, cut into documents as they stream.

A file is one document, unless it has separator lines (`<|endoftext|>`, alone on a line): then those stand between its
documents. The documents of one large file without separators are blocks of it, cut at line ends: so that a share of it
can be held out, and so that none of it must be in memory whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.prepare.errors import not_utf8
from trainer.prepare.sources.files import SourceFile, Span
from trainer.prepare.sources.streams import line_start, lines_from, open_content
from trainer.prepare.texts import Text

__all__ = ["DOCUMENT_BYTES", "SEPARATOR", "documents"]

SEPARATOR = b"<|endoftext|>"
DOCUMENT_BYTES = 16 << 20
"""No document is larger: what is longer goes on as another one."""
BLOCK_BYTES = 64 << 10
"""Of a large file without separators, what counts as one document: about 16 thousand tokens."""


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
    parts: list[bytes] = []
    place, size, owned = 0, 0, span.start == 0
    with open_content(span.file.path, max(0, span.start - 1)) as stream:
        for at, line in lines_from(stream, span.start, span.file.weights[0], DOCUMENT_BYTES):
            if line.strip() == SEPARATOR:
                if parts and owned:
                    yield _text(span.file, place, b"".join(parts))
                parts, size, owned = [], 0, at < span.stop
            elif owned:
                place = place if parts else at
                parts.append(line)
                size += len(line)
                if size >= DOCUMENT_BYTES:
                    whole, rest = _whole_characters(b"".join(parts))
                    yield _text(span.file, place, whole)
                    place, parts, size = place + len(whole), [rest] if rest else [], len(rest)
            if not owned and at >= span.stop:
                return
    if parts and owned:
        yield _text(span.file, place, b"".join(parts))


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
            raw, rest = (raw, b"") if begins else _whole_characters(raw)
            yield _text(span.file, place, raw)
            place += len(raw)
        if rest:
            yield _text(span.file, place, rest)


def _whole(span: Span) -> Iterator[Text]:
    with open_content(span.file.path) as stream:
        raw = stream.read(DOCUMENT_BYTES + 1)
    text = _text(span.file, 0, raw)
    yield Text(span.file.name, text.text)


def _whole_characters(raw: bytes) -> tuple[bytes, bytes]:
    """Cut off the beginning of a character that the bytes do not hold whole: one has at most four bytes."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (raw[:-back], raw[-back:]) if length > back else (raw, b"")
        if byte < 0x80:
            break
    return raw, b""


def _text(file: SourceFile, place: int, raw: bytes) -> Text:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file.path, raw[error.start], place + error.start) from None
    return Text(f"{file.name}#{place}", text.removeprefix("\ufeff").replace("\r\n", "\n"))
