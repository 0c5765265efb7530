"""The documents of a part of a source, whatever its form; a source that changes or goes away meanwhile is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from trainer.prepare.errors import Refusal
from trainer.prepare.sources import lines, parquet, plain
from trainer.prepare.sources.files import Form, SourceFile, Span
from trainer.prepare.texts import Text

__all__ = ["load_for", "read_spans"]


def load_for(forms: Collection[Form]) -> None:
    """Load what files of these forms are read with. A process that forks others does, or each would have its own."""
    if "parquet" in forms:
        parquet.load_pyarrow()


def read_spans(spans: Iterable[Span], column: str, unpack_in: Path | None = None) -> Iterator[Text]:
    """The documents of some spans in order. Raises Refusal for whatever a source can have wrong with it.

    The dictionaries of Parquet's large pages are kept in a folder meanwhile (None: where temporary files are).
    """
    for span in spans:
        _check_unchanged(span.file)
        yield from _documents(span, column, unpack_in)
        _check_unchanged(span.file)


def _documents(span: Span, column: str, unpack_in: Path | None) -> Iterator[Text]:
    if span.file.form == "parquet":
        return parquet.rows(span, column, unpack_in)
    return lines.rows(span, column) if span.file.form == "lines" else plain.documents(span)


def _check_unchanged(file: SourceFile) -> None:
    try:
        now = file.path.stat()
    except OSError as error:
        raise Refusal(
            "data.vanished",
            f"{file.path} was there when preparing began and is not any more: {error.strerror}.",
            hint="Bring it back as it was, its time too (cp -p); the same command then goes on where it stood.",
        ) from None
    if (now.st_size, now.st_mtime_ns) != (file.bytes, file.modified_ns):
        raise Refusal(
            "data.changed",
            f"{file.path} changed while it was being prepared: {file.bytes:,} bytes were there, now {now.st_size:,}.",
            hint="Prepare again into another folder once nothing writes to it, or from a copy.",
        )
