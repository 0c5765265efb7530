"""JSON Lines: one object a line, with the document in one of its keys; plain, gzip or zstd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trainer.prepare.errors import Refusal
from trainer.prepare.sources.files import SourceFile, Span
from trainer.prepare.sources.streams import lines_from, open_content
from trainer.prepare.texts import Text

__all__ = ["rows"]

LINE_BYTES = 64 << 20
"""A longer line is refused: it would have to be in memory whole."""


def rows(span: Span, column: str) -> Iterator[Text]:
    """The documents of the lines that begin within a span; a line whose text is null has none."""
    file = span.file
    with open_content(file.path, max(0, span.start - 1)) as stream:
        for place, line in lines_from(stream, span.start, span.stop, LINE_BYTES):
            if len(line) == LINE_BYTES and not line.endswith(b"\n"):
                raise _bad_line(file, place, f"is longer than {LINE_BYTES >> 20} MB")
            if line.strip():
                record = _parsed(file, place, line)
                text = record[column] if column in record else _no_text(file, place, column, record)
                if text is not None and not isinstance(text, str):
                    raise _bad_line(file, place, f"has {type(text).__name__} under {column!r}, which is no text")
                url = record.get("url")
                if text:
                    yield Text(f"{file.name}#{place}", text, url if isinstance(url, str) else "")


def _parsed(file: SourceFile, place: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise Refusal(
            "data.not_utf8",
            f"{file.path} is not UTF-8 in the line at offset {place:,}.",
            hint="JSON is UTF-8; write the file again.",
        ) from None
    except ValueError as error:
        raise _bad_line(file, place, f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _bad_line(file, place, f"is {type(record).__name__}, not an object")
    return record


def _no_text(file: SourceFile, place: int, column: str, record: dict[str, Any]) -> None:
    keys = ", ".join(sorted(record)) or "none"
    raise Refusal(
        "data.no_text_column",
        f"{file.path} has no {column!r} in the line at offset {place:,}; its keys are: {keys}.",
        hint="Name the one that holds the documents: --text-column NAME.",
    )


def _bad_line(file: SourceFile, place: int, what: str) -> Refusal:
    return Refusal(
        "data.bad_line",
        f"The line at offset {place:,} of {file.path} {what}.",
        hint="Every line is one JSON object with the text of a document; mend that line or take it out.",
    )
