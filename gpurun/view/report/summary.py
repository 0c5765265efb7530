"""The report's short form for a terminal: one row per run, and the curve of a single run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpurun.core.clock import local_time
from gpurun.core.money import format_usd
from gpurun.core.receipt_record import on_gpu
from gpurun.view.number_format import UNKNOWN, format_count, format_duration, format_loss
from gpurun.view.receipt_screen import shutdown_words, signature_word
from gpurun.view.report.report_model import RunMaterial, is_drawn, own_settings, why_unranked
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, line, wrap
from gpurun.view.table import Column, table
from gpurun.view.terminal_charts import line_chart


def _columns(runs: Sequence[RunMaterial]) -> tuple[Column, ...]:
    """Return the columns. Their headings suit all of the runs."""
    are_recipes = all(run.terms.has_model for run in runs)
    return (
        Column("RUN"),
        Column("RECIPE" if are_recipes else "JOB", leaves=3),
        Column("MACHINE", leaves=6, least=12),
        Column("BEGAN", leaves=2),
        Column("TRAINED" if are_recipes else "RAN", right=True, leaves=4),
        Column("COST", right=True),
        Column("TOKENS", right=True, leaves=5),
        Column("LOSS", right=True),
        Column("BEST VAL", right=True),
        Column("VERDICT", least=13),
        Column("SHUTDOWN", leaves=7),
        Column("SETTINGS", leaves=1, least=16),
    )


def summary(runs: Sequence[RunMaterial], style: Style) -> list[Line]:
    """Return the output of `gpurun report` without --html."""
    rows = [[*_cells(run), own] for run, own in zip(runs, own_settings(runs), strict=True)]
    lines = table(_columns(runs), rows, style)
    if len(runs) == 1 and is_drawn(runs):
        content = runs[0].history
        points, marks = ([(float(m.step), m.loss) for m in kept.items] for kept in (content.losses, content.validation))
        lines.append(line())
        lines += [
            line(Span(f"  {row}"))
            for row in line_chart(points, marks=marks, width=style.width - 4, height=11, unicode=style.unicode)
        ]
    notes = [wrap(f"{run.run}: {note}", style, indent=2, look="dim") for run in runs for note in run.notes]
    unranked = why_unranked(runs)
    notes += [wrap(unranked, style, indent=2, look="dim")] if unranked else []
    return [*lines, *([line()] if notes else []), *(shown for note in notes for shown in note)]


def _cells(run: RunMaterial) -> list[Cell]:
    last, best = run.last, run.history.best
    return [
        Span(run.run, "title"),
        run.recipe,
        run.history.device or run.where,
        local_time(run.began_wall, now=0.0).split()[0] if run.began_wall else UNKNOWN,
        UNKNOWN if run.train_s is None else format_duration(run.train_s),
        Span(UNKNOWN if run.cost_micros is None else format_usd(run.cost_micros), "money"),
        UNKNOWN if last is None or last.tokens is None else format_count(last.tokens),
        format_loss(last.loss if last else None),
        format_loss(best.loss if best else None),
        _verdict(run),
        _shutdown(run),
    ]


def _shutdown(run: RunMaterial) -> Span:
    """Return how the run's machine ended, in one or two words; UNKNOWN without a receipt or with a bad signature."""
    if run.receipt is None or signature_word(run.receipt) == "bad":
        return Span(UNKNOWN)
    end = shutdown_words(run.receipt.predicate)
    return Span(re.split("[,:·]", end.text)[0].strip(), end.look)


def _verdict(run: RunMaterial) -> Span:
    """Return the receipt's verdict; "BAD SIGNATURE" in that case, because then verdict and cost cannot be trusted."""
    if run.receipt is None:
        return Span(run.no_receipt, "warn")
    if signature_word(run.receipt) == "bad":
        return Span("BAD SIGNATURE", "bad")
    verdict = run.receipt.predicate["verdict"]
    return Span(verdict["is"], "good" if on_gpu(verdict) else "warn")
