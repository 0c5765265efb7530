"""Tables (CSV, TSV and similar): recognised if all rows agree, else refused with the flags that resolve the doubt.

Training never relies on a guess: a file that is named like a table but does not parse as one is in doubt, and so is a
text whose many lines all have the same number of cells.
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
from gpurun.data.refusals import MOST_NAMES, MOST_ROW_BYTES, bad_row, name_first, no_column
from gpurun.data.source_file import Table
from gpurun.data.streams import open_content, plain_name
from gpurun.data.texts import END, look_through

_DELIMITERS = ",;\t|"
_SUFFIXES = (".csv", ".tsv", ".tab", ".psv")
_HEAD_BYTES = 64 << 10
"""If the file is not named like a table, its first row must fit here: a text may be one line of gigabytes."""
_FEW_ROWS, _MANY_ROWS = 3, 50
"""With a header, fewer rows do not count as agreement; without one, more rows cannot agree by chance."""
_NAME_CHARS, _NAME_WORDS = 40, 3


@dataclass(frozen=True)
class _Reading:
    """The result of reading a file as one kind of table: the rows that agree, and why reading stopped early."""

    table: Table
    first: tuple[str, ...]
    rows: int = 0
    fault: str = ""
    has_empty_column: bool = False
    error: UsageError | None = None
    """The error, if a row is too long."""

    def breaks_off(self, layout: Layout) -> bool:
        """Return whether too many rows for chance agree up to a fault: then it is not a text."""
        is_named = set(layout.columns) <= set(self.first) and self.rows >= _FEW_ROWS
        return bool(self.fault) and (is_named or (self.rows >= _MANY_ROWS and not self.has_empty_column))

    @property
    def has_head(self) -> bool:
        """Return whether the first row has names; its first name may be empty, for the index of pandas."""
        names = [cell.strip() for cell in self.first]
        named = names[1:] if len(names) > 1 and not names[0] else names
        is_short = all(0 < len(cell) <= _NAME_CHARS and len(cell.split()) <= _NAME_WORDS for cell in named)
        is_named = not any(cell.replace(".", "").isdigit() for cell in named)
        return is_short and is_named and len(set(names)) == len(names) <= 10 * MOST_NAMES


def is_called_table(path: Path) -> bool:
    """Return whether a file's name is that of a table, packed or not."""
    return plain_name(path).endswith(_SUFFIXES)


def table_of(path: Path, layout: Layout, *, is_alone: bool) -> Table | None:
    """Return how a file is written as a table with the requested columns; None for a text.

    UsageError if it is a table without them, or in doubt. `is_alone` means that the source is this one file, so that
    a flag about tables concerns it.
    """
    if layout.delimiter == AS_TEXT:
        return None
    is_called = is_called_table(path)
    is_demanded = is_called or (is_alone and bool(layout.delimiter or not layout.has_head))
    if layout.per_line and not is_demanded:
        return None
    readings = list(_readings(path, layout, is_demanded=is_demanded))
    agreed = [reading for reading in readings if not reading.fault]
    if not layout.has_head:
        return _headless(path, layout, agreed, readings, is_demanded=is_demanded)
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
            raise _in_doubt(path, f"its rows have {_cells(agreed)}, but the first row is not a header", best)
    broken = [reading for reading in readings if is_demanded or reading.breaks_off(layout)]
    if broken or is_demanded:
        errors = (reading.error for reading in broken if reading.error is not None)
        raise next(errors, None) or _in_doubt(path, _why(readings, layout), best)
    return None


def _headless(
    path: Path, layout: Layout, agreed: Sequence[_Reading], readings: Sequence[_Reading], *, is_demanded: bool
) -> Table | None:
    """Return how a table without a header is written; its columns are numbers, and it must have enough of them."""
    best = max(agreed, key=lambda reading: len(reading.first), default=None)
    if best is None or (best.rows < _MANY_ROWS and not is_demanded):
        if is_demanded:
            raise _in_doubt(path, _why(readings, layout), best)
        return None
    if sum(len(reading.first) > 1 for reading in agreed) > 1:
        raise _in_doubt(path, f"its rows have {_cells(agreed)}", best)
    there = [str(number + 1) for number in range(len(best.first))]
    chosen = layout.column or layout.template
    if len(there) > 1 and not chosen:
        raise _in_doubt(path, f"its rows have {_cells(agreed)}, and no column is named", best)
    if missing := [name for name in layout.columns if name not in there]:
        raise no_column(path, missing[0], there)
    return best.table._replace(has_head=False)


def _readings(path: Path, layout: Layout, *, is_demanded: bool) -> Iterator[_Reading]:
    """Yield the file's reading as each kind of table that it could be."""
    with open_content(path) as stream:
        head = stream.read(_HEAD_BYTES + 1).removeprefix(b"\xef\xbb\xbf")
    first, ended, _ = head.partition(b"\n")
    is_marked = END in head  # A text with marks between documents: a mark has two characters that could be delimiters.
    if not is_demanded and (is_marked or (not ended and len(head) > _HEAD_BYTES)):
        return
    for delimiter in layout.delimiter or _DELIMITERS:
        is_single = delimiter == "," and first.decode("utf-8", "replace").strip().strip('"') in layout.columns
        if delimiter.encode() not in first and not (is_single or is_demanded):
            continue
        reading = _read(path, Table(delimiter, is_quoted=True, has_head=True))
        if reading.fault or delimiter == "\t":
            bare = _read(path, Table(delimiter, is_quoted=False, has_head=True))
            # If the quotes enclose nothing, they would merge two rows into one.
            reading = bare if not bare.fault and reading.rows != bare.rows and delimiter != "," else reading
        if len(reading.first) > 1 or is_single or (is_demanded and delimiter == (layout.delimiter or ",")):
            yield reading


def _read(path: Path, table: Table) -> _Reading:
    """Read a file as a table to its end, or to the first row that does not agree."""
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
    """Yield the rows of a table, including the first, without blank lines; UsageError with the place of a bad row.

    If `is_strict`, a row with more or fewer cells than the first is refused.
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
                    what = f"it has {len(cells)} cells, but the first row {count}"
                    raise bad_row(path, f"row {number}", what)
                count, number = count or len(cells), number + 1
                yield cells
        except UnicodeDecodeError:
            look_through(path)
            raise
        except csv.Error as error:
            raise bad_row(path, f"line {rows.line_num}", str(error)) from None


def _cells(readings: Sequence[_Reading]) -> str:
    several = [reading for reading in readings if len(reading.first) > 1]
    return " or ".join(f"{len(read.first)} cells each by {_sign(read.table.delimiter)}" for read in several)


def _sign(delimiter: str) -> str:
    return "tab" if delimiter == "\t" else f"{delimiter!r}"


def _why(readings: Sequence[_Reading], layout: Layout) -> str:
    """Return why a file that is named like a table does not parse as one."""
    furthest = max((reading for reading in readings if reading.fault), key=lambda reading: reading.rows, default=None)
    if furthest is None:
        by = _sign(layout.delimiter) if layout.delimiter else "any sign"
        return f"its first row is not {name_first(layout.columns)!r}, and nothing is separated by {by}"
    return f"by {_sign(furthest.table.delimiter)} {furthest.fault}"


def _in_doubt(path: Path, why: str, best: _Reading | None) -> UsageError:
    """Return the refusal of a file that may be a table, with the flags that resolve the doubt."""
    first = f" The first row: {name_first([cell.strip() or '(empty)' for cell in best.first])}." if best else ""
    return UsageError(
        "data.table_in_doubt",
        f"{path} may be a table or a text: {why}.{first}",
        hint="Use flags of gpurun data prepare: --text-column NAME (with --no-header a number from 1), --no-header, "
        "--delimiter ';' or tab; or --delimiter none for a text.",
    )
