"""The audit table: what was promised, what was found, and the one verdict per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpurun.core.money import Figure, Micros, format_figure, format_usd, left_of, percent_of, total
from gpurun.view.number_format import UNKNOWN
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, flow, fold, line
from gpurun.view.table import Column, table

Mark = Literal["ok", "bad", "none"]


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One run audited. `measured_is`: whether it cost that, at most that or at least that."""

    run: str
    chain: Mark
    signature: Mark
    files: str
    death: str
    verdict: str
    level: Literal["ok", "warn", "bad"] = "ok"
    measured_micros: Micros | None = None
    billed_micros: Micros | None = None
    measured_is: Figure = Figure.MEASURED


@dataclass(frozen=True)
class AuditSummary:
    """What stands under the table. `seq` are the first and last receipt of the chain; `head` is worth writing down.

    `problems` counts what is wrong with the chain as a whole, beside the rows.
    """

    receipts: int
    unbroken: bool
    problems: int = 0
    seq: tuple[int, int] | None = None
    head: str = ""


def audit_screen(rows: Sequence[AuditRow], summary: AuditSummary, style: Style, *, exit_code: int) -> list[Line]:
    """The table, the chain's head, and how many problems there are."""
    columns = (
        Column("RUN"),
        Column("CHAIN", leaves=2),
        Column("SIGN", leaves=3),
        Column("FILES", leaves=4),
        Column("DEATH", leaves=1),
        Column("COST", right=True),
        Column("BILLED", right=True, leaves=5),
        Column("Δ", right=True, leaves=6),
        Column("VERDICT", least=22),
    )
    nothing = "No run was opened since that day." if summary.receipts else "No receipts yet."
    lines = table(columns, [_cells(row) for row in rows], style) if rows else [line(f"  {nothing}")]
    span = f" #{summary.seq[0]:04d}…#{summary.seq[1]:04d}" if summary.seq else ""
    chain = line("chain unbroken" if summary.unbroken else Span("CHAIN BROKEN", "bad"), span)
    cost = total(*(row.measured_micros for row in rows if row.measured_micros is not None))
    kinds = {Figure.FLOOR if row.measured_micros is None else row.measured_is for row in rows}
    kind = next((one for one in (Figure.FLOOR, Figure.BOUND) if one in kinds), Figure.MEASURED)
    count = line(f"{summary.receipts} receipt{'s' * (summary.receipts != 1)}")
    lines += flow([count, chain, line(f"total {format_figure(cost, kind)}")], style, gap=" · ", indent=2)
    # Whole: what is written down is compared digit by digit (`--head`).
    lines += fold(f"head {summary.head}", style, indent=2) if summary.head else []
    problems, warnings = (sum(row.level == level for row in rows) for level in ("bad", "warn"))
    problems += summary.problems
    said = f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}."
    suffix = f"   exit {exit_code}" if exit_code else ""
    look = "bad" if problems or not summary.unbroken else "warn" if warnings else "good"
    return [*lines, line("  ", Span(said, look), Span(suffix, "dim"))]


def _cells(row: AuditRow) -> list[Cell]:
    look = {"ok": "good", "warn": "warn", "bad": "bad"}[row.level]
    difference = UNKNOWN
    if row.measured_micros and row.billed_micros is not None:
        difference = f"{percent_of(left_of(row.billed_micros, row.measured_micros), row.measured_micros):+.1f} %"
    return [
        Span(row.run, "title"),
        _mark(row.chain),
        _mark(row.signature),
        row.files,
        Span(row.death, "" if row.level != "bad" else look),
        UNKNOWN if row.measured_micros is None else format_figure(row.measured_micros, row.measured_is),
        UNKNOWN if row.billed_micros is None else format_usd(row.billed_micros),
        difference.replace("-", "−"),
        Span(row.verdict, look),
    ]


def _mark(mark: Mark) -> Span:
    return {"ok": Span("✔", "good"), "bad": Span("✘", "bad"), "none": Span(UNKNOWN, "dim")}[mark]
