"""What is known of a file of a source, and which part of it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Form", "SourceFile", "Span"]

Form = Literal["whole", "blocks", "separated", "lines", "parquet"]
"""How a file holds documents: it is one; text cut at line ends; text cut at separator lines; JSON Lines; rows."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: its name below the source's root, its size and time when it was looked at, and how it can be divided.

    `weights` are the bytes of text to be expected: of each row group of a Parquet file, else one number, the bytes of
    the (unpacked) content. There may be a million of them: none has a path of its own.
    """

    name: str
    root: Path
    form: Form
    bytes: int
    modified_ns: int
    weights: tuple[int, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.root / self.name

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of the whole file."""
        return sum(self.weights)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file: row groups of a Parquet file, else bytes of content; a line belongs to where it begins."""

    file: SourceFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """The bytes of text that are expected of it."""
        if self.file.form == "parquet":
            return sum(self.file.weights[self.start : self.stop])
        return self.stop - self.start
