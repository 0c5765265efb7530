"""Recognises tables (CSV, TSV and similar), whose rows all have the same number of cells.

Training never relies on a guess. If a file is named like a table but cannot be parsed as one, or if all lines of a
long text have the same number of cells, it is refused, and the error names the flags that decide how it is read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

from gpurun.core.errors import UsageError
from gpurun.data.bounded_rows import TableLines
from gpurun.data.layout import AS_TEXT, Layout
from gpurun.data.refusals import MOST_NAMES, MOST_ROW_BYTES, bad_row, name_list, no_column
from gpurun.data.source_file import Table
from gpurun.data.streams import open_content, plain_name
from gpurun.data.texts import END, look_through

_DELIMITERS = ",;\t|"
_SUFFIXES = (".csv", ".tsv", ".tab", ".psv")
_HEAD_BYTES = 64 << 10
"""The limit for the first row of a file that is not named like a table, because a text may be one line of gigabytes."""
_FEW_ROWS, _MANY_ROWS = 3, 50
"""The least number of rows that proves a table: with the requested columns in its header, and otherwise."""
_NAME_CHARS, _NAME_WORDS = 40, 3


@dataclass(frozen=True)
class _Reading:
    """The result of reading a file with one delimiter: the number of valid rows, and why reading stopped early."""

    table: Table
    first: tuple[str, ...]
    rows: int = 0
    fault: str = ""
    has_empty_column: bool = False
    error: UsageError | None = None
    """The error if a row is too long or is not UTF-8."""

    def breaks_off(self, layout: Layout) -> bool:
        """Return whether a fault follows enough valid rows to show that the file is a table, not a text."""
        is_named = set(layout.columns) <= set(self.first) and self.rows >= _FEW_ROWS
        return bool(self.fault) and (is_named or (self.rows >= _MANY_ROWS and not self.has_empty_column))

    @property
    def has_head(self) -> bool:
        """Return whether the first row consists of names; the first may be empty, as pandas writes it for an index."""
        names = [cell.strip() for cell in self.first]
        named = names[1:] if len(names) > 1 and not names[0] else names
        is_short = all(0 < len(cell) <= _NAME_CHARS and len(cell.split()) <= _NAME_WORDS for cell in named)
        is_named = not any(cell.replace(".", "").isdigit() for cell in named)
        return is_short and is_named and len(set(names)) == len(names) <= 10 * MOST_NAMES


def is_called_table(path: Path) -> bool:
    """Return whether a file's name has a table's suffix, before that of a packing if there is one."""
    return plain_name(path).endswith(_SUFFIXES)


def table_of(path: Path, layout: Layout, *, is_alone: bool) -> Table | None:
    """Return the format of a table that has the requested columns; None if the file is a text.

    UsageError if it is a table without these columns, or may be a table or a text. `is_alone` means that this file is
    the whole source, so flags about tables apply to it.
    """
    if layout.delimiter == AS_TEXT:
        return None
    is_called = is_called_table(path)
    is_demanded = is_called or (is_alone and bool(layout.delimiter or not layout.has_head))
    if layout.per_line and not is_demanded:
        return None
    readings = list(_try_delimiters(path, layout, is_demanded=is_demanded))
    agreed = [reading for reading in readings if not reading.fault]
    if not layout.has_head:
        return _detect_headless_table(path, layout, agreed, readings, is_demanded=is_demanded)
    for reading in agreed:
        is_named = all(reading.first.count(name) == 1 for name in layout.columns)
        if is_named and (reading.rows >= _FEW_ROWS or is_demanded):
            return reading.table
    best = max(agreed, key=lambda reading: len(reading.first), default=None)
    if best is not None and len(best.first) > 1:
        if best.has_head and (is_demanded or (is_alone and best.rows >= _FEW_ROWS)):
            missing = next(name for name in layout.columns if name not in best.first)
            raise no_column(path, missing, best.first)
        if is_demanded or (best.rows >= _MANY_ROWS and not best.has_empty_column):
            why = f"its rows have {_describe_cell_counts(agreed)}, but the first row is not a header"
            raise _ambiguous_file_error(path, why, best)
    broken = [reading for reading in readings if is_demanded or reading.breaks_off(layout)]
    if broken or is_demanded:
        errors = (reading.error for reading in broken if reading.error is not None)
        raise next(errors, None) or _ambiguous_file_error(path, _describe_parse_failure(readings, layout), best)
    return None


def _detect_headless_table(
    path: Path, layout: Layout, agreed: Sequence[_Reading], readings: Sequence[_Reading], *, is_demanded: bool
) -> Table | None:
    """Return the format of a table without a header, whose columns are numbered; None if the file is a text.

    UsageError if a requested column does not exist.
    """
    best = max(agreed, key=lambda reading: len(reading.first), default=None)
    if best is None or (best.rows < _MANY_ROWS and not is_demanded):
        if is_demanded:
            raise _ambiguous_file_error(path, _describe_parse_failure(readings, layout), best)
        return None
    if sum(len(reading.first) > 1 for reading in agreed) > 1:
        raise _ambiguous_file_error(path, f"its rows have {_describe_cell_counts(agreed)}", best)
    there = [str(number + 1) for number in range(len(best.first))]
    chosen = layout.column or layout.template
    if len(there) > 1 and not chosen:
        raise _ambiguous_file_error(
            path, f"its rows have {_describe_cell_counts(agreed)}, and no column is named", best
        )
    if missing := [name for name in layout.columns if name not in there]:
        raise no_column(path, missing[0], there)
    return best.table._replace(has_head=False)


def _try_delimiters(path: Path, layout: Layout, *, is_demanded: bool) -> Iterator[_Reading]:
    """Yield the result of reading the file with each delimiter that is possible."""
    with open_content(path) as stream:
        head = stream.read(_HEAD_BYTES + 1).removeprefix(b"\xef\xbb\xbf")
    first, ended, _ = head.partition(b"\n")
    is_marked = END in head  # The mark between documents has two characters that could be delimiters.
    if not is_demanded and (is_marked or (not ended and len(head) > _HEAD_BYTES)):
        return
    for delimiter in layout.delimiter or _DELIMITERS:
        is_single = delimiter == "," and first.decode("utf-8", "replace").strip().strip('"') in layout.columns
        if delimiter.encode() not in first and not (is_single or is_demanded):
            continue
        reading = _read_as_table(path, Table(delimiter, is_quoted=True, has_head=True))
        if reading.fault or delimiter == "\t":
            bare = _read_as_table(path, Table(delimiter, is_quoted=False, has_head=True))
            # A quote that does not enclose a cell would merge two rows.
            reading = bare if not bare.fault and reading.rows != bare.rows and delimiter != "," else reading
        if len(reading.first) > 1 or is_single or (is_demanded and delimiter == (layout.delimiter or ",")):
            yield reading


def _read_as_table(path: Path, table: Table) -> _Reading:
    """Read a file as a table to its end, or to the first row with a different number of cells."""
    first: tuple[str, ...] = ()
    rows, empty = 0, set[int]()
    try:
        for cells in rows_of(path, table, is_strict=False):
            if not first:
                first, empty = tuple(cells), set(range(len(cells)))
            elif len(cells) != len(first):
                fault = (
                    f"row {rows} has {len(cells)} {'cell' if len(cells) == 1 else 'cells'}, the first row {len(first)}"
                )
                return _Reading(table, first, rows, fault, has_empty_column=bool(empty))
            elif empty:
                empty = {place for place in empty if not cells[place].strip()}
            rows += 1
    except UsageError as error:
        if error.code == "data.bad_line":
            return _Reading(table, first, rows, error.what.partition(": ")[2].rstrip(".") or "it is not a table")
        if error.code == "data.row_too_long":
            return _Reading(table, first, rows, "a row is too long", has_empty_column=bool(empty), error=error)
        if error.code == "data.not_utf8":
            return _Reading(table, first, rows, "it is not UTF-8", error=error)
        raise
    return _Reading(table, first, rows, "" if rows else "it is empty", has_empty_column=bool(empty))


def rows_of(path: Path, table: Table, *, is_strict: bool = True) -> Iterator[list[str]]:
    """Yield a table's rows, including the first, without blank lines; UsageError, with the place, for a bad row.

    If `is_strict`, a row whose number of cells differs from the first row's is refused.
    """
    csv.field_size_limit(MOST_ROW_BYTES)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if table.is_quoted else csv.QUOTE_NONE
    with open_content(path) as stream:
        lines = TableLines(TextIOWrapper(stream, "utf-8-sig", newline=""), path, table.delimiter)
        rows = csv.reader(lines, delimiter=table.delimiter, quoting=quoting, strict=True)
        count, number = 0, 0
        try:
            for cells in rows:
                lines.begin_row()
                if not cells:
                    continue
                if is_strict and count and len(cells) != count:
                    what = f"it has {len(cells)} cells, but the first row has {count}"
                    raise bad_row(path, f"row {number}", what)
                count, number = count or len(cells), number + 1
                yield cells
        except UnicodeDecodeError:
            look_through(path)
            raise
        except csv.Error as error:
            raise bad_row(path, f"line {rows.line_num}", str(error)) from None


def _describe_cell_counts(readings: Sequence[_Reading]) -> str:
    several = [reading for reading in readings if len(reading.first) > 1]
    return " or ".join(
        f"{len(found.first)} cells each, split at {_name_delimiter(found.table.delimiter)}" for found in several
    )


def _name_delimiter(delimiter: str) -> str:
    return "tab" if delimiter == "\t" else f"{delimiter!r}"


def _describe_parse_failure(readings: Sequence[_Reading], layout: Layout) -> str:
    """Return why a file that is named like a table cannot be parsed as one."""
    furthest = max((reading for reading in readings if reading.fault), key=lambda reading: reading.rows, default=None)
    if furthest is None:
        by = _name_delimiter(layout.delimiter) if layout.delimiter else "any sign"
        return f"its first row is not {name_list(layout.columns)!r}, and nothing is separated by {by}"
    return f"split at {_name_delimiter(furthest.table.delimiter)}, {furthest.fault}"


def _ambiguous_file_error(path: Path, why: str, best: _Reading | None) -> UsageError:
    """Return the error for a file that may be a table or a text; its hint names the flags that decide it."""
    first = f" The first row: {name_list([cell.strip() or '(empty)' for cell in best.first])}." if best else ""
    return UsageError(
        "data.table_in_doubt",
        f"{path} may be a table or a text: {why}.{first}",
        hint="Use flags of gpurun data prepare: --text-column NAME (with --no-header a number from 1), --no-header, "
        "--delimiter ';' or tab; or --delimiter none for a text.",
    )
