"""Yields the documents in JSON Lines, a JSON array, a table or Parquet: each row is a document of some columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.untrusted import Malformed, parse_json
from gpurun.data import parquet
from gpurun.data.bounded_rows import members_of_array
from gpurun.data.layout import Layout
from gpurun.data.refusals import bad_row, no_column
from gpurun.data.source_file import Document, FileSpan, SourceFile
from gpurun.data.streams import lines_from, open_content
from gpurun.data.tables import rows_of
from gpurun.data.texts import look_through, split_at_marks

_PEEKED = 100
_UNBOUNDED = 1 << 62


def require_columns(path: Path, form: str, layout: Layout) -> None:
    """Raise UsageError if none of a JSON file's first rows has the requested columns; the error lists its columns."""
    there: set[str] = set()
    with open_content(path) as stream:
        rows = members_of_array(stream, path) if form == "array" else _parse_json_lines(stream, path)
        try:
            for row in islice(rows, _PEEKED):
                if not isinstance(row, dict) or all(
                    isinstance(row.get(name, 0), str | None) for name in layout.columns
                ):
                    return
                there.update(map(str, row))
        except UsageError as error:
            if error.code != "data.bad_line":
                raise
            if not there:  # The error in the first row is reported when the file is read.
                return
    missing = next((name for name in layout.columns if name not in there), "")
    if not missing:
        raise bad_row(path, f"its {form}", f"no row has a text under {layout.columns[0]!r}")
    raise no_column(path, missing, sorted(there), "key")


def _parse_json_lines(stream: Any, path: Path) -> Iterator[Any]:
    for place, line in lines_from(stream, path, 0, _UNBOUNDED):
        if line.strip():
            yield _parse_line(path, place, line)


def json_lines_documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    """Yield the documents of a part of a JSON Lines file."""
    file = span.file
    with open_content(file.path, max(0, span.start - 1)) as stream:
        for place, line in lines_from(stream, file.path, span.start, span.stop):
            if line.strip():
                row = _parse_line(file.path, place, line)
                yield from _build_row_documents(file, f"line at offset {place:,}", str(place), row, layout)


def _parse_line(path: Path, place: int, line: bytes) -> Any:
    try:
        return parse_json(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError:
        look_through(path)
        raise
    except Malformed as error:
        raise bad_row(path, f"line at offset {place:,}", str(error)) from None


def array_documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    """Yield the documents of a JSON array, which is read from its beginning, because rows have no fixed positions."""
    file = span.file
    with open_content(file.path) as stream:
        for number, row in enumerate(members_of_array(stream, file.path)):
            yield from _build_row_documents(file, f"object {number}", str(number), row, layout)


def string_documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    """Yield each string of a JSON array as a document."""
    file = span.file
    with open_content(file.path) as stream:
        for number, text in enumerate(members_of_array(stream, file.path)):
            if not isinstance(text, str):
                raise bad_row(
                    file.path, f"member {number}", f"it is {type(text).__name__}, but the members before it are text"
                )
            yield from split_at_marks(Document(f"{file.name}#{number}", replace_surrogates(text)))


def table_documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    """Yield the documents of a table, which is read from its beginning, because quotes may enclose line ends."""
    file = span.file
    assert file.table is not None
    rows = rows_of(file.path, file.table)
    names: list[str] = next(rows, []) if file.table.has_head else []
    for number, cells in enumerate(rows):
        names = names or [str(place + 1) for place in range(len(cells))]
        yield from _build_row_documents(
            file, f"row {number}", str(number), dict(zip(names, cells, strict=True)), layout
        )


def parquet_documents(span: FileSpan, layout: Layout) -> Iterator[Document]:
    """Yield the documents of some row groups of a Parquet file."""
    for number, cells, url in parquet.rows(span.file.path, range(span.start, span.stop), layout.columns):
        if text := layout.text_of(cells):
            yield from split_at_marks(Document(f"{span.file.name}#{number}", text, url))


def _build_row_documents(file: SourceFile, where: str, number: str, row: Any, layout: Layout) -> Iterator[Document]:
    """Yield the documents of a JSON row; a row whose text is null has none. UsageError if it is not an object."""
    if not isinstance(row, dict):
        raise bad_row(file.path, where, f"it is {type(row).__name__}, not an object")
    text, url = layout.text_of(_select_cells(file, where, row, layout)), row.get("url")
    if text:
        address = replace_surrogates(url) if isinstance(url, str) else ""
        yield from split_at_marks(Document(f"{file.name}#{number}", replace_surrogates(text), address))


def _select_cells(file: SourceFile, where: str, row: Mapping[str, Any], layout: Layout) -> dict[str, str]:
    """Return a row's texts for the requested columns; UsageError if one is missing or is not text."""
    cells = {}
    for name in layout.columns:
        if name not in row:
            raise no_column(file.path, name, sorted(map(str, row)), "key")
        if row[name] is not None and not isinstance(row[name], str):
            raise bad_row(file.path, where, f"it has {type(row[name]).__name__} under {name!r}, which is not text")
        cells[name] = row[name] or ""
    return cells


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which JSON can contain but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
