"""The screen of budgets: what is left of each, which runs reserve parts of it, and what was spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpurun.core.money import Micros, format_usd
from gpurun.view.number_format import UNKNOWN, format_duration
from gpurun.view.style import Style
from gpurun.view.styled_text import Line, Span, line, wrap
from gpurun.view.table import Column, table


@dataclass(frozen=True, slots=True)
class HoldRow:
    """The amount that a budget reserves for a run, in micro-dollars, and the time by which that run must end."""

    run: str
    micros: Micros
    until_wall: float


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One budget, in micro-dollars. Without a limit, `left_micros` is None."""

    name: str
    limit_micros: Micros | None
    spent_micros: int
    held_micros: int
    left_micros: Micros | None
    holds: tuple[HoldRow, ...] = ()


class SpentRow(Protocol):
    """The upper bound of the cost of one month's runs, for one job and one provider."""

    @property
    def month(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def recipe(self) -> str: ...
    @property
    def runs(self) -> int: ...
    @property
    def micros(self) -> Micros: ...


def budget_screen(
    budgets: Sequence[BudgetRow], spent: Sequence[SpentRow], unread: Sequence[str], style: Style, *, now: float
) -> list[Line]:
    """Return the budgets, each with its reserved amounts, then the table of costs from receipts."""
    sums = [Column(""), *(Column(name, right=True) for name in ("LIMIT", "SPENT", "HELD", "LEFT"))]
    cells = [
        [Span(row.name, "title"), *(Span(_amount(entry)) for entry in _amounts(row))]
        for row in budgets
    ]  # fmt: skip
    lines = table(sums, cells, style)
    for row in budgets:
        lines += [line("  ", Span(_describe_hold(hold, now))) for hold in row.holds]
        if row.limit_micros is None and row.name == "month":
            lines += wrap("No limit is set. To set one, write budget.month = 50 into config.toml.", style, indent=2)
    if spent:
        columns = (
            Column("MONTH"), Column("PROVIDER"), Column("JOB", leaves=1), Column("RUNS", right=True),
            Column("COST AT MOST", right=True),
        )  # fmt: skip
        rows = [
            [
                Span(entry.month),
                Span(entry.provider),
                Span(entry.recipe),
                Span(str(entry.runs)),
                Span(format_usd(entry.micros)),
            ]
            for entry in spent
        ]
        lines += [line(""), *table(columns, rows, style)]
    if unread:
        lines += wrap(f"Not counted, because their receipts cannot be read: {', '.join(unread)}.", style, indent=2)
    return lines


def _amounts(row: BudgetRow) -> tuple[int | None, ...]:
    return row.limit_micros, row.spent_micros, row.held_micros, row.left_micros


def _amount(micros: int | None) -> str:
    return UNKNOWN if micros is None else format_usd(Micros(micros))


def _describe_hold(hold: HoldRow, now: float) -> str:
    left_s = hold.until_wall - now
    when = f"for {format_duration(left_s)} at most" if left_s > 0 else "past its deadline; see gpurun ps"
    return f"{hold.run or 'a run'} holds {format_usd(hold.micros)}, {when}"
