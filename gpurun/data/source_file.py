"""Defines a source's file, a part of a file, and a document: the records that the readers of data exchange."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Form = Literal["whole", "pieces", "separated", "per_line", "lines", "array", "strings", "table", "parquet"]
"""How a file contains documents: as one, in pieces, separated by marks or line ends, or in some kind of rows."""
DIVISIBLE: tuple[Form, ...] = ("pieces", "separated", "per_line", "lines", "parquet")
"""Forms of files that a task can read in part; other files are read as a whole."""
ROWS: tuple[Form, ...] = ("lines", "array", "table", "parquet")
"""Forms of files whose documents are rows with named cells."""


class Table(NamedTuple):
    """A table's format: the separator of its cells, whether quotes enclose cells, and whether it has a header row.

    Without a header row the columns are called 1, 2, … All rows have the same number of cells.
    """

    delimiter: str
    is_quoted: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its name, which is its position in the source (`part-3.parquet#1204`).

    `begins` is False for a piece that continues the text of the piece before it. `url` is the row's address, or "".
    `held_out` means that the whole file is for validation; otherwise the text decides whether it is held out.
    """

    name: str
    text: str
    url: str = ""
    begins: bool = True
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: its name below the source's root, its size and time when it was inspected, and how it can be divided.

    `weights` are the expected bytes of text: one number per row group of a Parquet file, else a single number for the
    unpacked content. A full path is not stored, because there may be a million files. `piece_bytes` is the size of the
    pieces if the form is "pieces". `held_out` means that the whole file is for validation.
    """

    name: str
    root: Path
    form: Form
    bytes: int
    modified_ns: int
    weights: tuple[int, ...]
    piece_bytes: int = 0
    table: Table | None = None
    held_out: bool = False

    @property
    def path(self) -> Path:
        """Return the file's path."""
        return self.root / self.name

    @property
    def text_bytes(self) -> int:
        """Return the expected bytes of text in the whole file."""
        return sum(self.weights)


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A part of a file: row groups of Parquet, else bytes. A document belongs to the part where it begins."""

    file: SourceFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """Return the expected bytes of text in the part."""
        if self.file.form == "parquet":
            return sum(self.file.weights[self.start : self.stop])
        return self.stop - self.start
