"""Parquet, row group by row group, page by page: only the columns that are needed, some megabytes at a time.

pyarrow holds a page three times over, and pages are made of so many rows: 3 MB of what the web has, of books hundreds.
Row groups that have such pages are read by `pages/` instead, in pieces.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from trainer.prepare.errors import Refusal, listed, unreadable
from trainer.prepare.sources.files import Span
from trainer.prepare.sources.pages import Chunk, Source, is_known, largest_page, values
from trainer.prepare.sources.streams import PIECE_BYTES, whole_characters
from trainer.prepare.texts import Text

__all__ = ["group_bytes", "load_pyarrow", "rows"]

_BATCH_BYTES = 2 << 20
_MOST_ROWS = 4096
_BUFFER_BYTES = 1 << 20
_LARGE_PAGE_BYTES = 2 << 20

Row = tuple[Source | None, str]
"""A row's text, None for null, and what stands in its column `url`, if that is a string."""


def group_bytes(path: Path, column: str) -> tuple[int, ...]:
    """The bytes of text in each row group. Raises Refusal for a damaged file and for one without such a column."""
    with _opened(path) as file:
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        if not kinds.get(column, "").startswith(("string", "large_string", "string_view")):
            there = listed([f"{name} ({kind})" for name, kind in kinds.items()])
            raise Refusal(
                "data.no_text_column",
                f"{path} has no text in a column {column!r}; its columns are: {there}.",
                hint="Name the one that holds the documents: --text-column NAME.",
            )
        place = _place_of(file, column)
        groups = (file.metadata.row_group(index).column(place) for index in range(file.metadata.num_row_groups))
        return tuple(group.total_uncompressed_size for group in groups)


def rows(span: Span, column: str, unpack_in: Path | None = None) -> Iterator[Text]:
    """The documents of a span's row groups; a row whose text is null has none.

    The dictionaries of large pages are kept in files without a name in a folder (None: where temporary files are).
    """
    with _opened(span.file.path) as file, open(span.file.path, "rb") as raw:
        url = "url" if "url" in file.schema_arrow.names and column != "url" else None
        for group in range(span.start, span.stop):
            chunk, text_bytes = _chunk(file, group, column), span.file.weights[group]
            if _is_for_parts(raw, chunk, text_bytes):
                found = _in_parts(file, group, url, values(raw, chunk, unpack_in))
            else:
                found = _whole(file, group, column, url, text_bytes)
            for number, (value, known) in enumerate(found):
                if value is not None:
                    yield from _texts(f"{span.file.name}#{group}.{number}", value, known)


def _is_for_parts(raw: BinaryIO, chunk: Chunk, text_bytes: int) -> bool:
    """Whether there is a large page, and all are of a kind that can be read in parts."""
    if text_bytes <= _LARGE_PAGE_BYTES:
        return False
    try:
        return largest_page(raw, chunk) > _LARGE_PAGE_BYTES and is_known(raw, chunk)
    except (EOFError, RecursionError):
        return False  # Damaged, or written in a way that is not known here: pyarrow knows which.


def _whole(file: Any, group: int, column: str, url: str | None, text_bytes: int) -> Iterator[Row]:
    import pyarrow

    columns = [column, *([url] if url else [])]
    count = file.metadata.row_group(group).num_rows
    size = min(max(_BATCH_BYTES * count // max(1, text_bytes), 1), _MOST_ROWS)
    for text, *urls in _scalars(file, group, columns, size):
        value = pyarrow.BufferReader(text.as_buffer()) if text.is_valid else None
        yield value, _address(urls[0]) if urls else ""


def _in_parts(file: Any, group: int, url: str | None, texts: Iterator[Source | None]) -> Iterator[Row]:
    if url is None:
        return zip(texts, repeat(""), strict=False)
    urls = _scalars(file, group, [url], _MOST_ROWS)
    return ((text, _address(known)) for text, (known,) in zip(texts, urls, strict=True))


def _address(scalar: Any) -> str:
    """What stands in a row's column `url`; writers of Parquet do not see to it that a string is UTF-8."""
    try:
        value = scalar.as_py()
    except UnicodeDecodeError:
        raw = scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""
        return str(raw, "utf-8", "replace")
    return value if isinstance(value, str) else ""


def _scalars(file: Any, group: int, columns: list[str], size: int) -> Iterator[tuple[Any, ...]]:
    """The rows of some columns of a row group, so many of them read at a time."""
    for batch in file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
        yield from zip(*batch.columns, strict=True)


def _texts(name: str, value: Source, url: str) -> Iterator[Text]:
    """A row's document, in pieces where it is long; an empty one has none."""
    rest, continues = b"", False
    while piece := rest + value.read(PIECE_BYTES - len(rest)):
        # What is cut off of the end of a document is no character.
        piece, rest = whole_characters(piece) if len(piece) == PIECE_BYTES else (piece, b"")
        text, piece = piece.decode("utf-8", "replace"), b""  # Which would be there while the text is worked on.
        yield Text(name, text, url, continues)
        continues = True


def _chunk(file: Any, group: int, column: str) -> Chunk:
    place = _place_of(file, column)
    about = file.metadata.row_group(group).column(place)
    starts = [start for start in (about.dictionary_page_offset, about.data_page_offset) if start]
    has_nulls = file.schema.column(place).max_definition_level > 0
    return Chunk(min(starts, default=0), about.num_values, about.compression, has_nulls)


def _place_of(file: Any, column: str) -> int:
    """The index of a column among the leaves of the schema, which nested columns have more of."""
    return next(place for place in range(len(file.schema)) if file.schema.column(place).path == column)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    arrow, parquet = load_pyarrow()
    try:
        # Without pre_buffer and with a buffer, a row group is read page by page instead of whole.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            yield file
    except (arrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # That is the disk on which a dictionary is kept.
        if isinstance(error, FileNotFoundError | PermissionError):
            raise unreadable(path, error) from None
        what = " ".join(str(error).split())[:200].rstrip(".")
        raise Refusal(
            "data.cut_short",
            f"{path} is no Parquet file, damaged or cut short: {what} ({path.stat().st_size:,} bytes are there).",
            hint="Download or copy that file again, and compare its size with the original's.",
        ) from None


def load_pyarrow() -> tuple[ModuleType, ModuleType]:
    """pyarrow and its reader of Parquet, which start no thread by that; a Refusal if it is not installed."""
    # Its own allocator keeps what it once had; the system's gives back what a large page took. The variables are for
    # all of it, but read only when it is loaded; a caller that loaded it before us gets the rest.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Refusal(
            "data.no_pyarrow", "Parquet files are read with pyarrow, which is not installed here.",
            hint="Install it, from the clone: pip install '.[data]'",
        ) from None  # fmt: skip
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    return pyarrow, pyarrow.parquet
