"""Draws the live view of a run as it stood when a given step came: `make picture RUN=runs/fox-41 STEP=30`.

The picture in the README is made by this from a real rehearsal, so that it cannot promise what the view does not draw.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from gpurun.core.paths import RunFolder
from gpurun.core.run_plan import Plan
from gpurun.core.trainer_events import parse_event
from gpurun.ledger.journal import read_journal
from gpurun.ledger.spending import spent_by
from gpurun.view.live_layout import live_screen
from gpurun.view.live_state import Screen
from gpurun.view.style import Style
from gpurun.view.styled_text import Span, spell

COLORS = {"title": "#ffffff", "dim": "#8b949e", "good": "#56d364", "warn": "#e3b341", "bad": "#ff7b72",
          "accent": "#79c0ff", "money": "#ffffff", "": "#c9d1d9"}  # fmt: skip
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 14


def main(folder: RunFolder, step: int) -> str:
    """The screen of that run after its event for `step`, 100 columns wide."""
    style = Style(width=100, height=34, color=True, redraw=True)
    screen = Screen(Plan.from_json(folder.plan.read_bytes()), spent_by)
    events = [event for line in folder.events.read_bytes().splitlines() if (event := parse_event(line))]
    shown = [event for event in events if (event.step or 0) <= step]
    now = shown[-1].wall or 0.0
    records = [record for record in read_journal(folder.journal).records if record.wall <= now]
    log = folder.log.read_bytes().splitlines()
    last = next((n for n, line in enumerate(log) if line.startswith(f"step {step:04d}".encode())), len(log) - 1)
    screen.update(records, shown, log[: last + 1])
    return svg([[spell(span, style) for span in line] for line in live_screen(screen, style, now=now)], style.width)


def svg(lines: list[list[Span]], columns: int) -> str:
    """Lines of styled spans as one SVG in the reader's own monospace font."""
    width, height = columns * CELL_WIDTH + 2 * MARGIN, len(lines) * CELL_HEIGHT + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-size="14" '
        "font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace\">",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    for row, spans in enumerate(lines):
        x, y = float(MARGIN), MARGIN + (row + 1) * CELL_HEIGHT - 5
        for span in spans:
            length = len(span.text) * CELL_WIDTH
            if span.text.strip():
                out.append(text(span, x, y, length))
            x += length
    return "\n".join([*out, "</svg>"])


def text(span: Span, x: float, y: float, length: float) -> str:
    """One span at its cells, stretched to exactly their width whatever font there is."""
    weight = ' font-weight="bold"' if span.look in ("title", "money", "bad") else ""
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{COLORS[span.look]}"{weight} textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(span.text)}</text>'
    )


if __name__ == "__main__":
    sys.stdout.write(main(RunFolder(Path(sys.argv[1])), int(sys.argv[2])))
