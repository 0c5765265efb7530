"""The audit table: one row per run, with the result of each check, the cost, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping

from gpurun.core.money import Figure, Micros, format_figure, format_usd, left_of, percent_of
from gpurun.ledger.audit.findings import NO, AuditReport, AuditRow, Mark
from gpurun.view.number_format import UNKNOWN
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, flow, fold, line
from gpurun.view.table import Column, table


def audit_screen(
    report: AuditReport,
    billed: Mapping[str, Micros | None],
    next_commands: Mapping[str, str],
    style: Style,
    *,
    exit_code: int,
) -> list[Line]:
    """Return the table, the head of the chain of receipts (which users should note), and the number of problems.

    `next_commands` has, for each run that may be billed and that no process drives, the command that continues it.
    """
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
    nothing = "No run has been opened since that day." if report.receipts else "No receipts yet."
    lines = [line(f"  {nothing}")]
    if report.rows:
        lines = table(
            columns, [_cells(row, billed.get(row.run), next_commands.get(row.run)) for row in report.rows], style
        )
    seqs = [row.seq for row in report.rows if row.seq is not None]
    span = f" #{min(seqs):04d}…#{max(seqs):04d}" if seqs else ""
    is_unbroken = not report.problems and all(row.chain != "bad" for row in report.rows)
    chain = line("chain unbroken" if is_unbroken else Span("CHAIN BROKEN", "bad"), span)
    kinds = {Figure.FLOOR if row.measured_micros is None else row.measured_is for row in report.rows}
    kind = next((figure for figure in (Figure.FLOOR, Figure.BOUND) if figure in kinds), Figure.MEASURED)
    count = line(f"{report.receipts} receipt{'s' * (report.receipts != 1)}")
    lines += flow([count, chain, line(f"total {format_figure(report.total_micros, kind)}")], style, gap=" · ", indent=2)
    # The head is shown in full, because a noted head is compared digit by digit (`--head`).
    lines += fold(f"head {report.head}", style, indent=2) if report.receipts else []
    looks = [_look(row, is_lost=row.run in next_commands) for row in report.rows]
    problems, warnings = looks.count("bad") + len(report.problems), looks.count("warn")
    counts = f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}."
    suffix = f"   exit {exit_code}" if exit_code else ""
    look = "bad" if problems or not is_unbroken else "warn" if warnings else "good"
    return [*lines, line("  ", Span(counts, look), Span(suffix, "dim"))]


def _look(row: AuditRow, *, is_lost: bool) -> str:
    return "bad" if row.problems or is_lost else "warn" if row.warnings else "good"


def _cells(row: AuditRow, billed_micros: Micros | None, next_command: str | None) -> list[Cell]:
    look, difference, verdict = _look(row, is_lost=next_command is not None), UNKNOWN, row.verdict
    if row.measured_micros and billed_micros is not None:
        difference = f"{percent_of(left_of(billed_micros, row.measured_micros), row.measured_micros):+.1f} %"
    if next_command is not None:
        verdict = f"MAY BE BILLING → {next_command}"
    elif row.problems:
        verdict = NO.upper()
    elif row.may_be_billing:
        verdict = "running"
    return [
        Span(row.run, "title"),
        _as_span(row.chain),
        _as_span(row.signature),
        row.files,
        Span(row.death, look if look == "bad" else ""),
        UNKNOWN if row.measured_micros is None else format_figure(row.measured_micros, row.measured_is),
        UNKNOWN if billed_micros is None else format_usd(billed_micros),
        difference.replace("-", "−"),
        Span(verdict, look),
    ]


def _as_span(mark: Mark) -> Span:
    return {"ok": Span("✔", "good"), "bad": Span("✘", "bad"), "none": Span(UNKNOWN, "dim")}[mark]
