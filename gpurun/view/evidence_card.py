"""A run's evidence card, in Markdown and as a self-contained page, and a table of a class's cards."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import Any

from gpurun.core.money import format_figure
from gpurun.core.receipt_record import Predicate, Receipt
from gpurun.core.untrusted import safe_text
from gpurun.view.number_format import UNKNOWN, format_loss
from gpurun.view.receipt_markdown import card_pairs, escape_markdown, file_rows, literal_block, receipt_markdown
from gpurun.view.receipt_screen import log_lines, sample_text
from gpurun.view.report.escape import escape_line, lines_escaped, tag
from gpurun.view.style import Style
from gpurun.view.styled_text import Cell, Line, Span, line
from gpurun.view.table import Column, table

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border:1px solid #8884;padding:.3rem .6rem;text-align:left;"
    "vertical-align:top;overflow-wrap:anywhere}pre{overflow:auto;background:#8881;padding:.6rem}"
    "svg{display:block;width:100%;fill:none;stroke:#888}polyline{stroke:#2a6fdb;stroke-width:2}"
    "text{font-size:12px;fill:currentColor;stroke:none}:root{color-scheme:light dark}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_COLUMNS = (
    "student", "file", "run", "verdict", "recipe", "steps", "data", "trainer", "device", "loss", "val_loss", "cost",
    "receipt", "replayed", "problems", "notes",
)  # fmt: skip


Quoted = Sequence[tuple[str, Sequence[str]]]
"""Blocks of log lines, each with its title."""


def card_markdown(
    receipt: Receipt, *, platform: str, shutdown: str = "", more: Sequence[tuple[str, str]] = (), quoted: Quoted = ()
) -> str:
    """Return the card for a platform that accepts text. `platform` is the place where it ran, as the user typed it.

    `more` are rows in addition to the receipt's. `quoted` are blocks of log lines.
    """
    predicate = receipt.predicate
    rows = "".join(
        f"| {name} | {escape_markdown(text)} |\n" for name, text in [*_first_rows(predicate, platform), *more]
    )
    head = f"# Evidence card: {escape_markdown(predicate['run'])}\n\n| | |\n| --- | --- |\n{rows}\n"
    page = receipt_markdown(receipt, shutdown=shutdown).replace("# Receipt", "## Receipt", 1)
    blocks = [line for title, lines in quoted for line in ("", *literal_block(title, lines))]
    return "\n".join([head + page, *blocks]) + "\n"


def card_html(
    receipt: Receipt,
    *,
    platform: str,
    shutdown: str = "",
    more: Sequence[tuple[str, str]] = (),
    quoted: Quoted = (),
    losses: Sequence[tuple[int, float]] = (),
) -> str:
    """Return the card as one HTML page without scripts or links. It begins with the curve of its `losses`."""
    predicate, verdict = receipt.predicate, receipt.predicate["verdict"]
    pairs = [*_first_rows(predicate, platform), *more, *card_pairs(receipt, shutdown)]
    for _, files in file_rows(predicate):
        pairs += [(name, f"sha256 {sha256}" if sha256 else "") for name, sha256 in files]
    rows = "".join(tag("tr", tag("th", escape_line(name)) + tag("td", escape_line(text))) for name, text in pairs)
    texts = (("Log", log_lines(predicate)), ("Sample", safe_text(sample_text(predicate))), *quoted)
    blocks = "".join(
        tag("h2", escape_line(title)) + tag("pre", lines_escaped(lines)) for title, lines in texts if lines
    )
    title = escape_line(f"Evidence card: {predicate['run']}")
    says = tag("p", tag("strong", escape_line(verdict["says"])) + " " + escape_line(verdict.get("not_shown", "")))
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{_STYLE}</style>"
    )
    body = f"<h1>{title}</h1>{loss_curve(losses)}{says}<table>{rows}</table>{blocks}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def loss_curve(losses: Sequence[tuple[int, float]]) -> str:
    """Return losses by step as an SVG, drawn without a library; "" for fewer than two losses."""
    drawn = [(step, loss) for step, loss in losses if isfinite(loss)]
    if len(drawn) < 2:
        return ""
    first, last = drawn[0][0], drawn[-1][0]
    low, high = min(loss for _, loss in drawn), max(loss for _, loss in drawn)
    width, height, left, top = 640, 200, 60, 12

    def place(step: int, loss: float) -> str:
        across, up = (step - first) / (last - first), (loss - low) / (high - low) if high > low else 0.5
        return f"{left + across * width:.1f},{top + (1 - up) * height:.1f}"

    points, below = " ".join(place(step, loss) for step, loss in drawn), top + height
    texts = (
        (left - 8, top + 5, "end", f"{high:.3g}"), (left - 8, below, "end", f"{low:.3g}"),
        (left, below + 20, "start", f"step {first:,}"), (left + width, below + 20, "end", f"step {last:,}"),
    )  # fmt: skip
    words = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts)
    return (
        f'<svg viewBox="0 0 {left + width + 12} {below + 28}" role="img" aria-label="Loss by step">'
        f'<path d="M{left} {top}V{below}H{left + width}"/><polyline points="{points}"/>{words}</svg>'
    )


def _first_rows(predicate: Predicate, platform: str) -> list[tuple[str, str]]:
    """Return the rows of a card that precede its receipt."""
    challenge = predicate["asked"].get("challenge", "")
    verdict = predicate["verdict"]
    first = [("Platform", platform), ("Challenge", challenge), ("Verdict", verdict["is"])]
    return [(name, text) for name, text in first if text]


def roster_screen(rows: Sequence[Any], style: Style) -> list[Line]:
    """Return a table with one row per card or learner, and then the count of each verdict. `rows` are `CardRow`s."""
    is_replayed = any(row.replayed for row in rows)
    columns = (
        Column("LEARNER"),
        Column("FILE", leaves=3),
        Column("RUN", leaves=2),
        Column("RECIPE", leaves=8),
        Column("STEPS", right=True, leaves=9),
        Column("DEVICE", leaves=4),
        Column("LOSS", right=True, leaves=5),
        Column("VAL", right=True, leaves=6),
        Column("COST", right=True, leaves=1),
        *([Column("REPLAYED", leaves=7)] if is_replayed else []),
        Column("VERDICT", least=22),
    )
    cells: list[list[Cell]] = []
    for row in rows:
        look = "bad" if row.problems else "good" if row.verdict.startswith("gpu") else "warn"
        cells.append(
            [
                Span(row.student or UNKNOWN, "title"),
                row.file or UNKNOWN,
                row.run or UNKNOWN,
                row.recipe or UNKNOWN,
                f"{row.steps:,}" if row.predicate else UNKNOWN,
                row.device or UNKNOWN,
                UNKNOWN if row.loss is None else format_loss(row.loss),
                UNKNOWN if row.val_loss is None else format_loss(row.val_loss),
                UNKNOWN if row.cost_micros is None else format_figure(row.cost_micros, row.cost_is),
                *([row.replayed or UNKNOWN] if is_replayed else []),
                Span(row.verdict.upper() if row.problems else row.verdict, look),
            ]
        )
    counts = Counter(row.verdict for row in rows)
    tally = " · ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    return [*(table(columns, cells, style) if rows else []), line(f"  {tally or 'no card in that folder'}")]


def roster_csv(rows: Sequence[Any]) -> str:
    """Return the cards as CSV. A cell that could run as a formula is quoted, because names are untrusted."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_COLUMNS)
    for row in rows:
        cost = "" if row.cost_micros is None else format_figure(row.cost_micros, row.cost_is)
        cells = [row.student, row.file, row.run, row.verdict, row.recipe, row.steps, row.data, row.trainer]
        cells += [row.device, row.loss, row.val_loss, cost, row.receipt_sha256, row.replayed]
        cells += ["; ".join(row.problems), "; ".join([*row.notes, *row.checked])]
        writer.writerow([f"'{cell}" if str(cell)[:1] in ("=", "+", "-", "@", "\t") else cell for cell in cells])
    return out.getvalue()
