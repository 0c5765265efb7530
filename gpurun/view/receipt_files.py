"""The files in a receipt: those that were downloaded, and those that were not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpurun.core.artifact_names import readable_name
from gpurun.core.collected_record import FileAtHome
from gpurun.core.receipt_record import Predicate
from gpurun.view.number_format import format_whole, short_hash
from gpurun.view.styled_text import Cell, Span

MOST_CELLS = 20
"""The most files of one kind that a screen shows. The receipt has all of them."""


@dataclass(frozen=True)
class FilesHome:
    """The files of one kind that a receipt lists. `unnamed` is how many more are only in the run's `collected.list`."""

    title: str
    files: list[FileAtHome]
    unnamed: int = 0

    def more(self, named: int) -> int:
        """Return how many files are not shown if `named` files are shown."""
        return len(self.files) + self.unnamed - min(named, len(self.files))


def files_home(predicate: Predicate) -> list[FilesHome]:
    """Return the downloaded files, except samples: checkpoints, and other outputs of a command."""
    named, listed = predicate["checkpoint"]["files"], predicate["checkpoint"].get("listed")
    files = [file for file in named if file["kind"] != "sample"]
    outputs = [file for file in files if file["kind"] == "output"]
    unnamed = listed["files"] - len(named) if listed else 0
    checkpoints = [file for file in files if file["kind"] != "output"]
    return [FilesHome("Checkpoints", checkpoints), FilesHome("Outputs", outputs, unnamed)]


def cells_home(predicate: Predicate) -> Iterator[tuple[str, list[Cell]]]:
    """Yield the title and the cells of each kind of file: names with digests, and a count of the others."""
    listed = predicate["checkpoint"].get("listed")
    for home in files_home(predicate):
        cells: list[Cell] = [
            f"{readable_name(str(file['name']))} {short_hash(file['sha256'])}" for file in home.files[:MOST_CELLS]
        ]
        if more := home.more(MOST_CELLS):
            digest = f" (collected.list {short_hash(listed['sha256'])})" if listed and home.unnamed else ""
            cells.append(f"and {format_whole(more)} more{digest}")
        yield home.title, cells


def files_missing(predicate: Predicate) -> list[Cell]:
    """Return the names of the files that were not downloaded."""
    named, listed = predicate["checkpoint"].get("missing") or (), predicate["checkpoint"].get("missing_files")
    cells: list[Cell] = [Span(readable_name(str(name)), "bad") for name in named]
    more = listed["files"] - len(named) if listed else 0
    return [*cells, *([Span(f"and {format_whole(more)} more (missing.list)", "bad")] if more > 0 else [])]
