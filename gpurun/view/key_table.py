"""The table of `auth status`: which providers have a key, and where each key was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span
from gpurun.view.table import Column, table


@dataclass(frozen=True)
class KeyRow:
    """The key of one provider. If `source` is None, no key was found, or a `problem` prevents its use."""

    name: str
    source: str | None
    problem: str = ""
    hint: str = ""
    about: str = ""


def keys_table(rows: Sequence[KeyRow], style: Style) -> list[Line]:
    """Return the keys in the given order. No part of a key's value is shown."""
    columns = (Column("PROVIDER"), Column("KEY"), Column("FROM", least=20), Column("", least=20, leaves=1))
    return table(columns, [_cells(row) for row in rows], style)


def _cells(row: KeyRow) -> list[Cell]:
    if row.problem:
        return [Span(row.name, "title"), Span("✘", "bad"), Span(row.problem, "bad"), Span(row.about, "dim")]
    mark = Span("✔", "good") if row.source else Span("no", "dim")
    return [Span(row.name, "title"), mark, row.source or "", Span(row.about, "dim")]
