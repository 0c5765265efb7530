"""The tables of the smaller verbs: ps, recipes, pack, config, doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpurun.core.clock import local_time
from gpurun.core.money import Figure, Micros, format_figure
from gpurun.view.number_format import UNKNOWN, format_bytes, format_count, format_duration, format_files, short_hash
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, hang, line, wrap
from gpurun.view.table import Column, table


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run for `ps`. `dies_wall` is the time by which its machine must end, `dies_by` is what enforces that.

    `spent_is` states whether the cost is exact, an upper bound or a lower bound.
    """

    run: str
    recipe: str
    where: str
    state: str
    step: int | None = None
    steps: int | None = None
    started_wall: float | None = None
    spent_micros: Micros | None = None
    worst_micros: Micros | None = None
    dies_wall: float | None = None
    dies_by: str = ""
    live: bool = False
    may_be_billing: bool = False
    spent_is: Figure = Figure.MEASURED


def ps_table(rows: Sequence[RunRow], style: Style, *, now: float) -> list[Line]:
    """Return runs that may be billed first, then active runs, then the rest; otherwise in the given order."""
    columns = (
        Column(""),
        Column("RUN"),
        Column("JOB", leaves=3),
        Column("WHERE", leaves=2),
        Column("STATE"),
        Column("STEP", right=True, leaves=5),
        Column("BEGAN", right=True, leaves=1),
        Column("SPENT", right=True),
        Column("WORST", right=True, leaves=4),
        Column("DIES"),
    )
    ordered = sorted(rows, key=lambda row: (not row.may_be_billing, not row.live))
    return table(columns, [_run_cells(row, now) for row in ordered], style)


def _run_cells(row: RunRow, now: float) -> list[Cell]:
    look = "bad" if row.may_be_billing else "" if row.live else "dim"
    state = "MAY BE BILLING" if row.may_be_billing else row.state
    return [
        Span("!" if row.may_be_billing else "●" if row.live else "", "bad" if row.may_be_billing else "good"),
        Span(row.run, "bad" if row.may_be_billing else "title" if row.live else ""),
        Span(row.recipe, look),
        Span(row.where, look),
        Span(state, look),
        Span("" if row.step is None else f"{row.step}/{row.steps}" if row.steps else f"{row.step}", look),
        Span(_format_beginning(row, now), look),
        Span(_format_amount(row.spent_micros, row.spent_is), look),
        Span(_format_amount(row.worst_micros), look),
        Span(_format_death(row, now), look),
    ]


def _format_beginning(row: RunRow, now: float) -> str:
    """Return how long ago an open run began; for a closed run, the date on which it began."""
    if row.started_wall is None:
        return UNKNOWN
    is_over = not row.live and not row.may_be_billing
    return (
        local_time(row.started_wall, now=now).split()[0]
        if is_over
        else f"{format_duration(now - row.started_wall)} ago"
    )


def _format_death(row: RunRow, now: float) -> str:
    if row.dies_wall is None:
        return row.dies_by or UNKNOWN
    left = row.dies_wall - now
    when = f"OVERDUE {format_duration(-left)}" if left < 0 else f"in {format_duration(left)}"
    return f"{when} · {row.dies_by}" if row.dies_by else when


def _format_amount(amount: Micros | None, figure: Figure = Figure.MEASURED) -> str:
    return UNKNOWN if amount is None else format_figure(amount, figure)


@dataclass(frozen=True)
class RecipeRow:
    """One recipe for `recipes list`."""

    name: str
    parameters: int
    tokens: int
    gpu: str
    about: str


def recipes_table(rows: Sequence[RecipeRow], style: Style) -> list[Line]:
    """Return the recipes in the given order, each with its full description below it."""
    columns = (
        Column("RECIPE"),
        Column("PARAMETERS", right=True),
        Column("TOKENS", right=True, leaves=2),
        Column("GPU", leaves=1),
    )
    cells: list[list[Cell]] = [
        [Span(r.name, "title"), format_count(r.parameters), format_count(r.tokens), r.gpu] for r in rows
    ]
    heading, *heads = table(columns, cells, style)
    below = [wrap(row.about, style, indent=4, look="dim") for row in rows]
    return [heading, *(shown for first, rest in zip(heads, below, strict=True) for shown in (first, *rest))]


@dataclass(frozen=True)
class PackRow:
    """One file of a pack. A file with a `refusal` is not uploaded."""

    name: str
    bytes: int
    sha256: str = ""
    refusal: str = ""


def pack_listing(files: Sequence[PackRow], style: Style, *, packed_bytes: int | None = None) -> list[Line]:
    """Return exactly what would be uploaded, then what is refused and why, then the totals."""
    kept, refused = [f for f in files if not f.refusal], [f for f in files if f.refusal]
    columns = (Column("FILE", least=20), Column("SIZE", right=True), Column("SHA256", leaves=1))
    lines = table(columns, [[f.name, format_bytes(f.bytes), Span(short_hash(f.sha256), "dim")] for f in kept], style)
    for file in refused:
        lines += hang(Span("✘", "bad"), f"{file.name}: {file.refusal}", style)
    size = format_bytes(sum(f.bytes for f in kept))
    packed = f" → {format_bytes(packed_bytes)} packed" if packed_bytes is not None else ""
    refusals = f" · {len(refused)} refused" if refused else ""
    return [*lines, line(f"  {format_files(len(kept))} · {size}{packed}{refusals}")]


def config_table(rows: Sequence[tuple[str, str, str]], style: Style) -> list[Line]:
    """Return a table of settings: the key, the value, and where the value comes from."""
    columns = (Column("KEY"), Column("VALUE", least=12), Column("FROM", least=10))
    return table(columns, [[key, value or UNKNOWN, Span(source, "dim")] for key, value, source in rows], style)


@dataclass(frozen=True)
class Finding:
    """One result of `doctor`."""

    level: Literal["ok", "warn", "bad"]
    text: str
    hint: str = ""


def doctor_lines(findings: Sequence[Finding], style: Style) -> list[Line]:
    """Return a line for each finding: a mark, the finding, and what to do about it; then a summary."""
    blank = "" if style.unicode else " "  # In ASCII the tick is two letters wide, so the other marks get a blank.
    marks = {"ok": Span("✔", "good"), "warn": Span(f"!{blank}", "warn"), "bad": Span(f"✘{blank}", "bad")}
    lines: list[Line] = []
    for finding in findings:
        text = f"{finding.text} → {finding.hint}" if finding.hint else finding.text
        lines += hang(marks[finding.level], text, style)
    bad, warnings = (sum(f.level == level for f in findings) for level in ("bad", "warn"))
    if not bad and not warnings:
        return [*lines, line("  Everything is in order.")]
    return [*lines, line(f"  {_counted(bad, 'problem')}, {_counted(warnings, 'warning')}.")]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
