"""Checks text files before any work, and reads them as one document, or as pieces, parts or lines."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpurun.data.packing import BLOCK_BYTES
from gpurun.data.refusals import MOST_ROW_BYTES, has_nul, not_utf8, too_long
from gpurun.data.source_file import Document, FileSpan, SourceFile
from gpurun.data.streams import lines_from, open_content

END, START = b"<|endoftext|>", "<|startoftext|>"
"""GPT-2's mark between documents, and another mark that some texts have before each document."""


def look_through(path: Path) -> tuple[int, bool]:
    """Return the bytes of a text's content, and whether marks separate its documents; UsageError for invalid text.

    An error that was found only later would waste the work done before, because a corrected file is a new source.
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
    """Raise UsageError if a block at offset `place` makes the text invalid UTF-8; an empty block means the end."""
    place -= len(decoder.getstate()[0])
    try:
        decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.object, error.start, place + error.start) from None


def yield_whole(span: FileSpan) -> Iterator[Document]:
    """Yield a text as one document."""
    with open_content(span.file.path) as stream:
        yield Document(span.file.name, _decode_document(span.file, 0, stream.read(span.stop)))


def cut_text(span: FileSpan) -> Iterator[Document]:
    """Yield pieces of about `piece_bytes`, cut after a line end or a space; the last piece may end after the span."""
    size, file = span.file.piece_bytes, span.file
    place, stop = (_find_cut_from(file, at) if at else 0 for at in (span.start, span.stop))
    with open_content(file.path, place) as stream:
        rest, begins = b"", True
        while place < stop:
            rest += stream.read(max(0, min(2 * size, stop - place) - len(rest)))
            is_last = place + len(rest) >= stop and len(rest) <= size + size // 2
            piece = rest if is_last else rest[: _find_cut(rest, size)]
            if not piece:
                return
            yield Document(f"{file.name}#{place}", _decode_document(file, place, piece), begins=begins)
            place, rest, begins = place + len(piece), rest[len(piece) :], False


def _find_cut_from(file: SourceFile, place: int) -> int:
    """Return the offset, at `place` or soon after, where a text is cut; both adjacent tasks compute the same offset."""
    with open_content(file.path, place) as stream:
        return place + _find_cut(stream.read(file.piece_bytes), 0)


def _find_cut(raw: bytes, least: int) -> int:
    """Return the first offset from `least` on that follows a line end, else a space, else any character."""
    for gap in (b"\n", b" "):
        if place := raw.find(gap, least) + 1:
            return place
    return next((at for at in range(least, len(raw)) if raw[at] & 0xC0 != 0x80), len(raw))


def marked_documents(span: FileSpan) -> Iterator[Document]:
    """Yield each text that begins the file or follows a mark in the span, up to the next mark, even after the span."""
    file, is_owned, place, held = span.file, span.start == 0, span.start, b""
    with open_content(file.path, place) as stream:
        while block := stream.read(BLOCK_BYTES):
            *ended, held = (held + block).split(END)
            if len(held) > MOST_ROW_BYTES and is_owned:
                raise too_long(file.path, f"text at offset {place:,}")
            for part in ended:
                if is_owned:
                    yield Document(f"{file.name}#{place}", _decode_document(file, place, part))
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
        yield Document(f"{file.name}#{place}", _decode_document(file, place, held))


def _decode_document(file: SourceFile, place: int, raw: bytes) -> str:
    """Return a document's text without a byte-order mark or the rest of the separator's line; lines end in \\n."""
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(file.path, raw, error.start, place + error.start) from None
    if file.form != "separated":
        return text
    text = text.lstrip(" \t").removeprefix("\n") if place else text
    return text.removeprefix(START).removeprefix("\n") if text.startswith(START) else text


def line_documents(span: FileSpan) -> Iterator[Document]:
    """Yield each line as a document; a line end is added to the last line if it has none."""
    file = span.file
    with open_content(file.path, max(0, span.start - 1)) as stream:
        for place, line in lines_from(stream, file.path, span.start, span.stop):
            text = _decode_document(file, place, line).rstrip("\n")
            for part in split_at_marks(Document(f"{file.name}#{place}", text)):
                yield replace(part, text=f"{part.text}\n") if part.text.strip() else part


def split_at_marks(document: Document) -> Iterator[Document]:
    """Yield the documents of a row, which is split at marks."""
    mark = END.decode()
    if mark not in document.text:
        yield document
        return
    for part in document.text.split(mark):
        yield replace(document, text=part.lstrip("\n").removeprefix(START))
