"""The table of `recipes check`: the cost of each recipe's paid run, and the result of its rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.core.money import Micros, format_usd
from gpurun.view.number_format import UNKNOWN, format_duration, format_loss
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span
from gpurun.view.table import Column, table


@dataclass(frozen=True)
class CheckRow:
    """One recipe: its cheapest offer that finishes, its rehearsal on this computer, and whether both are in order."""

    recipe: str
    offer: str = ""
    planned_s: float | None = None
    planned_micros: Micros | None = None
    rehearsal_s: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    verdict: str = ""
    ok: bool = False


_COLUMNS = (
    Column(""),
    Column("RECIPE"),
    Column("CHEAPEST", leaves=2),
    Column("PLANNED", right=True),
    Column("COST", right=True),
    Column("REHEARSED", right=True, leaves=1),
    Column("FIRST LOSS", right=True, leaves=3),
    Column("LAST LOSS", right=True),
    Column("VERDICT", least=16),
)


def checks_table(rows: Sequence[CheckRow], style: Style) -> list[Line]:
    """Return one row per recipe, in the given order."""
    return table(_COLUMNS, [_cells(row) for row in rows], style)


def _cells(row: CheckRow) -> list[Cell]:
    look = "good" if row.ok else "bad"
    return [
        Span("✔" if row.ok else "✘", look),
        Span(row.recipe, "title"),
        row.offer,
        UNKNOWN if row.planned_s is None else format_duration(row.planned_s),
        Span(UNKNOWN if row.planned_micros is None else format_usd(row.planned_micros), "money"),
        UNKNOWN if row.rehearsal_s is None else format_duration(row.rehearsal_s),
        format_loss(row.first_loss),
        format_loss(row.last_loss),
        Span(row.verdict, look),
    ]
