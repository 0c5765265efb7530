"""A file of a source, a part of a file, and a document: the records that the readers of data exchange."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Form = Literal["whole", "pieces", "separated", "per_line", "lines", "array", "strings", "table", "parquet"]
"""How a file holds documents: as one, in pieces, separated by marks or line ends, or as one of the kinds of rows."""
DIVISIBLE: tuple[Form, ...] = ("pieces", "separated", "per_line", "lines", "parquet")
"""Files that a task can read in part; the others are read as a whole."""
ROWS: tuple[Form, ...] = ("lines", "array", "table", "parquet")
"""Files whose documents are rows with named cells."""


class Table(NamedTuple):
    """How a table is written: what separates its cells, whether quotes enclose cells, and whether it has a header row.

    Without a header the columns are called 1, 2, … Every row has as many cells as the first.
    """

    delimiter: str
    is_quoted: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A text; its name within the source says where it is (`part-3.parquet#1204`).

    `begins` is False for a piece that continues a text where the piece before it ended. `url` is a row's, or "".
    `held_out` means that its file is for validation; otherwise the text decides.
    """

    name: str
    text: str
    url: str = ""
    begins: bool = True
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: its name below the source's root, its size and time when it was inspected, and how it can be divided.

    `weights` are the expected bytes of text: for each row group of a Parquet file, else one number, the bytes of
    the (unpacked) content. There may be a million files, so they do not hold full paths. `piece_bytes` is for "pieces".
    `held_out` means that all of it is for validation.
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
    """A part of a file: row groups of a Parquet file, else bytes of content; documents belong to where they begin."""

    file: SourceFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """Return the expected bytes of text in the part."""
        if self.file.form == "parquet":
            return sum(self.file.weights[self.start : self.stop])
        return self.stop - self.start
