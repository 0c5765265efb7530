"""The files in a receipt, as a screen has them: what came home, and what did not."""

from __future__ import annotations

from gpurun.core.artifact_names import shown
from gpurun.core.collected_record import FileAtHome
from gpurun.core.receipt_record import Predicate
from gpurun.view.number_format import format_whole, short_hash
from gpurun.view.styled_text import Cell, Span

MOST_CELLS = 40
"""So many files stand on a screen; the receipt has the others."""


def checkpoint_files(told: Predicate) -> list[FileAtHome]:
    """What came home, but for the samples."""
    return [file for file in told["checkpoint"]["files"] if file["kind"] != "sample"]


def files_at_home(told: Predicate) -> list[Cell]:
    """What came home, by name and digest; of very many the first, and how many there are."""
    files, listed = checkpoint_files(told), told["checkpoint"].get("listed")
    cells: list[Cell] = [f"{shown(str(file['name']))} {short_hash(file['sha256'])}" for file in files[:MOST_CELLS]]
    if listed is None and len(files) <= MOST_CELLS:
        return cells
    count = listed["files"] if listed else len(files)
    digest = f" (collected.list {short_hash(listed['sha256'])})" if listed else ""
    return [*cells, f"and {format_whole(count - len(cells))} more{digest}"]


def files_missing(told: Predicate) -> list[Cell]:
    """The names of what did not come home."""
    named, listed = told["checkpoint"].get("missing") or (), told["checkpoint"].get("missing_files")
    cells: list[Cell] = [Span(shown(str(name)), "bad") for name in named]
    more = listed["files"] - len(named) if listed else 0
    return [*cells, *([Span(f"and {format_whole(more)} more (missing.list)", "bad")] if more > 0 else [])]
