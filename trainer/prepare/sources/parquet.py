"""Parquet, row group by row group, page by page: only the columns that are needed, some megabytes at a time.

A page is unpacked as a whole by whoever reads it, and pages are made of so many rows: of books, one may have hundreds
of megabytes, of which pyarrow holds up to two copies. Such row groups are unpacked to disk by one process at a time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.prepare.errors import Refusal, unreadable
from trainer.prepare.folders import locked
from trainer.prepare.sources.files import Span
from trainer.prepare.sources.streams import PIECE_BYTES, whole_characters
from trainer.prepare.texts import Text

__all__ = ["group_bytes", "rows"]

_BATCH_BYTES = 2 << 20
_MOST_ROWS = 4096
_BUFFER_BYTES = 1 << 20
_LARGE_PAGE_BYTES = 16 << 20
_PAGE_ROWS = 1024
"""Arrow and what learned from it look at a page's size after so many rows only."""


def group_bytes(path: Path, column: str) -> tuple[int, ...]:
    """The bytes of text in each row group. Raises Refusal for a damaged file and for one without such a column."""
    with _opened(path) as file:
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        if not kinds.get(column, "").startswith(("string", "large_string", "string_view")):
            listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise Refusal(
                "data.no_text_column",
                f"{path} has no text in a column {column!r}; its columns are: {listed}.",
                hint="Name the one that holds the documents: --text-column NAME.",
            )
        place = _place_of(file, column)
        groups = (file.metadata.row_group(index).column(place) for index in range(file.metadata.num_row_groups))
        return tuple(group.total_uncompressed_size for group in groups)


def rows(span: Span, column: str, unpack_in: Path | None = None) -> Iterator[Text]:
    """The documents of a span's row groups; a row whose text is null has none.

    Processes that read at once name one folder to unpack large pages in; without one, they are held in memory.
    """
    name = span.file.name
    with _opened(span.file.path) as file:
        columns = [column, *(["url"] if "url" in file.schema_arrow.names and column != "url" else [])]
        for group in range(span.start, span.stop):
            count = file.metadata.row_group(group).num_rows
            wanted = _BATCH_BYTES * count // max(1, span.file.weights[group])
            size = min(max(wanted, 1), _MOST_ROWS)
            batches = file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False)
            texts = _documents(batches, column, f"{name}#{group}")
            is_large = _page_bytes(file.metadata, count, span.file.weights[group]) > _LARGE_PAGE_BYTES
            yield from texts if unpack_in is None or not is_large else _by_way_of_disk(texts, unpack_in)


def _page_bytes(about: Any, count: int, group_bytes: int) -> int:
    """What a page of a row group may hold: its writer's habits are all that is known before it is read."""
    if str(about.created_by).startswith("DuckDB"):
        return group_bytes  # It makes pages of up to 100 MB, its older versions of a gigabyte, however small the rows.
    return group_bytes * min(count, _PAGE_ROWS) // max(1, count)


def _by_way_of_disk(texts: Iterator[Text], folder: Path) -> Iterator[Text]:
    """The same texts, once they have all been written to a file without a name: then no page is held any more."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder) as file:
        with locked(folder):
            for text in texts:
                file.write(json.dumps(astuple(text), ensure_ascii=False) + "\n")
        file.seek(0)
        for line in file:
            yield Text(*json.loads(line))


def _documents(batches: Iterable[Any], column: str, name: str) -> Iterator[Text]:
    number = 0
    for batch in batches:
        texts = batch.column(column)
        urls = batch.column("url") if column != "url" and "url" in batch.schema.names else None
        del batch  # While the next one is read, nothing of this one is held.
        for place in range(len(texts)):
            url = urls[place].as_py() if urls is not None else None
            yield from _texts(f"{name}.{number}", texts[place], url)
            number += 1
        del texts, urls


def _texts(name: str, value: Any, url: Any) -> Iterator[Text]:
    """A row's document, in pieces where it is long; none where it is null."""
    raw = memoryview(value.as_buffer()) if value.is_valid else memoryview(b"")
    known = url if isinstance(url, str) else ""
    start = 0
    while start < len(raw):
        piece, _ = whole_characters(bytes(raw[start : start + PIECE_BYTES]))
        yield Text(name, piece.decode("utf-8", "replace"), known, continues=start > 0)
        start += len(piece)


def _place_of(file: Any, column: str) -> int:
    """The index of a column among the leaves of the schema, which nested columns have more of."""
    return next(place for place in range(len(file.schema)) if file.schema.column(place).path == column)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    arrow, parquet = _pyarrow()
    try:
        # Without pre_buffer and with a buffer, a row group is read page by page instead of whole.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            yield file
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # That is the disk on which a large page was unpacked.
        if isinstance(error, FileNotFoundError | PermissionError):
            raise unreadable(path, error) from None
        what = " ".join(str(error).split())[:200].rstrip(".")
        raise Refusal(
            "data.cut_short",
            f"{path} is no Parquet file, damaged or cut short: {what} ({path.stat().st_size:,} bytes are there).",
            hint="Download or copy that file again, and compare its size with the original's.",
        ) from None


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    # Its own allocator keeps what it once had; the system's gives back what a large page took. The variable is for all
    # of it, but read only when it is loaded; whoever has loaded it before us gets the rest.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Refusal(
            "data.no_pyarrow", "Parquet files are read with pyarrow, which is not installed here.",
            hint="Install it: pip install 'gpurun[data]'",
        ) from None  # fmt: skip
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    return pyarrow, pyarrow.parquet
