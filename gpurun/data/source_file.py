"""A file of a source, a part of one, and a document: the records that every reader of data passes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Form = Literal["whole", "pieces", "separated", "per_line", "lines", "array", "strings", "table", "parquet"]
"""How a file holds documents: it is one; it is cut into pieces; marks or line ends part them; the kinds of rows."""
DIVISIBLE: tuple[Form, ...] = ("pieces", "separated", "per_line", "lines", "parquet")
"""Files of which a task may read a part; the others are read whole."""
ROWS: tuple[Form, ...] = ("lines", "array", "table", "parquet")
"""Files whose documents are rows with names for their cells."""


class Table(NamedTuple):
    """How a table is written: what parts its cells, whether quotes hold them together, and whether a head names them.

    Without a head the columns are called 1, 2, … Every row has as many cells as the first.
    """

    delimiter: str
    is_quoted: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A text: its name within the source says where it lies (`part-3.parquet#1204`).

    `begins` is False for a piece of a text that goes on where the one before it ended. `url` is a row's, or "".
    `held_out` where its file is for validation; of the others the text decides.
    """

    name: str
    text: str
    url: str = ""
    begins: bool = True
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: its name below the source's root, its size and time when it was looked at, and how it can be divided.

    `weights` are the bytes of text to be expected: of each row group of a Parquet file, else one number, the bytes of
    the (unpacked) content. There may be a million of them: none has a path of its own. `piece_bytes` is for "pieces".
    `held_out` where all of it is for validation.
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
        """Where it lies."""
        return self.root / self.name

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of the whole file."""
        return sum(self.weights)


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A part of a file: row groups of a Parquet file, else bytes of content; a document belongs to where it begins."""

    file: SourceFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of it."""
        if self.file.form == "parquet":
            return sum(self.file.weights[self.start : self.stop])
        return self.stop - self.start
