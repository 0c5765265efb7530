"""The documents of a source, whichever form its files have.

A file of text is one document, or documents with `<|endoftext|>` between them; a larger one without is cut into pieces,
each of which can be held out, and none of which must be in memory with the others. A row is a document in itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpurun.core.errors import UsageError
from gpurun.data import rows, texts
from gpurun.data.layout import Layout
from gpurun.data.source_file import Document, FileSpan, SourceFile
from gpurun.data.streams import size_and_time


def documents_of(spans: Iterable[FileSpan], layout: Layout) -> Iterator[Document]:
    """The documents of some spans in order, but blank ones. UsageError for whatever a source can have wrong with it."""
    for span in spans:
        _demand_unchanged(span.file)
        for document in _documents(span, layout):
            if document.text and not document.text.isspace():
                yield replace(document, held_out=True) if span.file.held_out else document
        _demand_unchanged(span.file)


def _documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    of_text = {
        "whole": texts.yield_whole,
        "pieces": texts.cut_text,
        "separated": texts.separated,
        "per_line": texts.lines,
    }
    of_rows = {
        "lines": rows.of_lines, "array": rows.of_array, "strings": rows.of_strings,
        "table": rows.of_table, "parquet": rows.of_parquet,
    }  # fmt: skip
    form = span.file.form
    return of_text[form](span) if form in of_text else of_rows[form](span, layout)


def _demand_unchanged(file: SourceFile) -> None:
    try:
        size, modified_ns = size_and_time(file.path)
    except OSError as error:
        raise UsageError(
            "data.vanished",
            f"{file.path} was there when preparing began and is not any more: {error.strerror}.",
            hint="Bring it back as it was, its time too (cp -p); the same command then goes on where it stood.",
        ) from None
    if (size, modified_ns) != (file.bytes, file.modified_ns):
        raise UsageError(
            "data.changed",
            f"{file.path} changed while it was being prepared: {file.bytes:,} bytes were there, now {size:,}.",
            hint="Prepare again into another folder once nothing writes to it, or from a copy.",
        )
