"""JSON Lines: one object a line, with the document in one of its keys; plain, gzip or zstd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainer.prepare.errors import Refusal, listed
from trainer.prepare.sources.files import SourceFile, Span
from trainer.prepare.sources.long_lines import NoSuchKey, NotAText, string_pieces
from trainer.prepare.sources.streams import PIECE_BYTES, lines_from, open_content, regrouped
from trainer.prepare.texts import Text, mended

__all__ = ["rows"]


def rows(span: Span, column: str) -> Iterator[Text]:
    """The documents of the lines that begin within a span; a line whose text is null has none."""
    file = span.file
    with open_content(file.path, max(0, span.start - 1)) as stream:
        lines = lines_from(stream, span.start, span.stop, PIECE_BYTES)
        for place, line in lines:
            if len(line) == PIECE_BYTES and not line.endswith(b"\n"):
                yield from _long_row(file, place, line, lines, column)
            elif line.strip():
                yield from _row(file, place, line, column)


def _row(file: SourceFile, place: int, line: bytes, column: str) -> Iterator[Text]:
    record = _parsed(file, place, line)
    if column not in record:
        raise _no_text(file, place, column, listed(sorted(record)))
    text, url = record[column], record.get("url")
    if text is not None and not isinstance(text, str):
        raise _no_string(file, place, column, type(text).__name__)
    if text:
        yield Text(f"{file.name}#{place}", mended(text), mended(url) if isinstance(url, str) else "")


def _long_row(
    file: SourceFile, place: int, first: bytes, lines: Iterator[tuple[int, bytes]], column: str
) -> Iterator[Text]:
    """A line that is too long to be in memory whole, with its other parts from `lines`.

    Its text is cut as that of a Parquet row is: what is held out or a duplicate must not depend on what stands before.
    """

    def parts() -> Iterator[bytes]:
        yield first
        for _, part in lines:
            yield part
            if part.endswith(b"\n"):
                return

    address, held = "", None

    def pieces() -> Iterator[str]:
        nonlocal address
        address = yield from string_pieces(parts(), column)

    try:
        for piece in regrouped(map(mended, pieces()), PIECE_BYTES):
            if held is not None:
                yield held
            held = Text(f"{file.name}#{place}", piece, continues=held is not None)
        if held is not None:
            yield replace(held, url=mended(address))  # Which may stand behind the text.
    except NoSuchKey as other:
        raise _no_text(file, place, column, str(other)) from None
    except NotAText as other:
        raise _no_string(file, place, column, str(other)) from None
    except UnicodeDecodeError:
        raise _not_utf8(file, place) from None
    except ValueError as error:
        raise _bad_line(file, place, f"is not JSON: {error}") from None


def _parsed(file: SourceFile, place: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise _not_utf8(file, place) from None
    except ValueError as error:
        raise _bad_line(file, place, f"is not JSON: {error}") from None
    except RecursionError:
        raise _bad_line(file, place, "is nested too deep") from None
    if not isinstance(record, dict):
        raise _bad_line(file, place, f"is {type(record).__name__}, not an object")
    return record


def _not_utf8(file: SourceFile, place: int) -> Refusal:
    what = f"{file.path} is not UTF-8 in the line at offset {place:,}."
    return Refusal("data.not_utf8", what, hint="JSON is UTF-8; write the file again.")


def _no_text(file: SourceFile, place: int, column: str, keys: str) -> Refusal:
    return Refusal(
        "data.no_text_column",
        f"{file.path} has no {column!r} in the line at offset {place:,}; its keys are: {keys}.",
        hint="Name the one that holds the documents: --text-column NAME.",
    )


def _no_string(file: SourceFile, place: int, column: str, kind: str) -> Refusal:
    return _bad_line(file, place, f"has {kind} under {column!r}, which is no text")


def _bad_line(file: SourceFile, place: int, what: str) -> Refusal:
    return Refusal(
        "data.bad_line",
        f"The line at offset {place:,} of {file.path} {what}.",
        hint="Every line is one JSON object with the text of a document; mend that line or take it out.",
    )
