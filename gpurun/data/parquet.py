"""Reads the needed columns of a Parquet file with pyarrow, one row group at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import install_line
from gpurun.data.parquet_pages import MOST_PAGE_BYTES, largest_page
from gpurun.data.refusals import MOST_ROW_BYTES, no_column, too_long, unreadable

_ROWS = 1024
"""The most rows of a row group that are read together; pyarrow also keeps the surrounding pages in memory."""


def group_bytes(path: Path, columns: Sequence[str]) -> tuple[int, ...]:
    """Return the bytes of text in each row group; UsageError if the file is damaged, or lacks these columns."""
    with _open_file(path) as file:
        for column in columns:
            _demand_text(path, file.schema_arrow, column)
        leaves = [file.schema.column(place).path for place in range(len(file.schema))]
        places = [leaves.index(column) for column in columns]
        groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
        return tuple(max(1, sum(group.column(place).total_uncompressed_size for place in places)) for group in groups)


def rows(path: Path, groups: Iterable[int], columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield (row group and number, texts by column, url or "") for each row of these groups; a null becomes ""."""
    with _open_file(path) as file:
        named = [*columns, *(["url"] if "url" in file.schema_arrow.names and "url" not in columns else [])]
        for group in groups:
            number, at_once = 0, _choose_rows_at_once(path, file, group, named)
            for batch in file.iter_batches(at_once, row_groups=[group], columns=named, use_threads=False):
                for cells in zip(*(_list_strings(batch.column(name)) for name in named), strict=True):
                    if sum(map(len, cells)) > MOST_ROW_BYTES:
                        raise too_long(path, f"row {number} of row group {group}")
                    texts = dict(zip(named, cells, strict=True))
                    url = texts.get("url", "") if "url" not in columns else ""
                    yield f"{group}.{number}", texts, url
                    number += 1


def _choose_rows_at_once(path: Path, file: Any, group: int, columns: list[str]) -> int:
    """Return the number of rows to read at once, from the size of the largest pages, which bounds the length of a row.

    A dictionary-encoded column has no such bound, because a page can repeat one long value.
    """
    leaves = [file.schema.column(place).path for place in range(len(file.schema))]
    chunks = [file.metadata.row_group(group).column(leaves.index(column)) for column in columns if column in leaves]
    return max(1, min(_ROWS, MOST_PAGE_BYTES // sum(largest_page(path, chunk) for chunk in chunks)))


def _list_strings(column: Any) -> Iterator[str]:
    """Yield a column's texts, and "" for a null or for invalid UTF-8, which some writers put into strings."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_text(column.type):
        return ("" for _ in range(len(column)))
    raw = column.cast(pyarrow.large_binary()) if not pyarrow.types.is_string_view(column.type) else column
    return (str(cell.as_buffer(), "utf-8", "replace") if cell.is_valid else "" for cell in raw)


def _is_text(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)
    )


def _demand_text(path: Path, schema: Any, column: str) -> None:
    import pyarrow

    kinds = {field.name: field.type for field in schema}
    if column not in kinds:
        raise no_column(path, column, [f"{name} ({kind})" for name, kind in kinds.items()])
    kind = kinds[column]
    if not _is_text(kind.value_type if pyarrow.types.is_dictionary(kind) else kind):
        raise UsageError(
            "data.no_text_column",
            f"{path} has {kind} in its column {column!r}, which is not text.",
            hint="Name the column with the documents: gpurun data prepare RECIPE --text-column NAME.",
        )


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            "data.no_pyarrow", "Reading Parquet files needs pyarrow, which is not installed here.",
            hint=install_line("data"),
        ) from None  # fmt: skip
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except pyarrow.ArrowMemoryError:  # This is also an ArrowException, but it does not mean that the file is damaged.
        raise
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise unreadable(path, error) from None
        what = " ".join(str(error).split())[:200].rstrip(".")
        raise UsageError(
            "data.cut_short",
            f"{path} is not a Parquet file, or is damaged or cut short: {what} ({path.stat().st_size:,} bytes).",
            hint="Download or copy the file again, and compare its size with the original's.",
        ) from None
