"""Yields the documents of a source, whatever form its files have.

A text file is one document, or several with `<|endoftext|>` between them. A large file without such marks is cut into
pieces, which need not be in memory together and can be held out separately. Each row of a table or JSON file is a
document.
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
    """Yield the documents of some spans in order, without blank documents; UsageError if a file is invalid."""
    for span in spans:
        _demand_unchanged(span.file)
        for document in _read_documents(span, layout):
            if document.text and not document.text.isspace():
                yield replace(document, held_out=True) if span.file.held_out else document
        _demand_unchanged(span.file)


def _read_documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    of_text = {
        "whole": texts.yield_whole,
        "pieces": texts.cut_text,
        "separated": texts.marked_documents,
        "per_line": texts.line_documents,
    }
    of_rows = {
        "lines": rows.json_lines_documents, "array": rows.array_documents, "strings": rows.string_documents,
        "table": rows.table_documents, "parquet": rows.parquet_documents,
    }  # fmt: skip
    form = span.file.form
    return of_text[form](span) if form in of_text else of_rows[form](span, layout)


def _demand_unchanged(file: SourceFile) -> None:
    try:
        size, modified_ns = size_and_time(file.path)
    except OSError as error:
        raise UsageError(
            "data.vanished",
            f"{file.path} existed when preparing began, but cannot be found now: {error.strerror}.",
            hint="Restore it unchanged, with its modification time (cp -p); then the same command resumes.",
        ) from None
    if (size, modified_ns) != (file.bytes, file.modified_ns):
        raise UsageError(
            "data.changed",
            f"{file.path} changed while it was being prepared: from {file.bytes:,} bytes to {size:,}.",
            hint="Prepare into a new folder when no program writes to the file any more, or use a copy of the file.",
        )
