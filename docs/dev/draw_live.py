"""Draws the live view of a run as it was at a given step: the README's pictures, and those of any other run.

    make picture                           # docs/*.svg and the README's text, from tests/golden/pictures
    make picture RUN=runs/fox-41 STEP=30   # any run, on standard output

A record there has what the view reads from a run's folder (plan, journal, events, log), so a picture cannot show what
the view does not draw; tests/golden/test_pictures.py draws each again.
"""

from __future__ import annotations

import os
import re
import sys
import time
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
DOCS = Path(__file__).resolve().parents[1]
RECORDS, README = DOCS.parent / "tests" / "golden" / "pictures", DOCS.parent / "README.md"
PICTURES = {
    "live.svg": ("rehearsal", 30, ""),
    "live-rented.svg": (
        "rented",
        150,
        "The cloud is an emulated one, on a computer without a GPU: no real account has been used yet.",
    ),
}
"""By file: the record, the step at which it is drawn, and the caption."""
_BLOCK = re.compile(r"(.*The live view[^\n]*\n(?:[^`\n][^\n]*\n)*\n```\n)(.*?)(```\n.*)", re.DOTALL)
WIDTH = 100
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 14


def view(folder: RunFolder, step: int) -> list[list[Span]]:
    """Return the screen of that run after its event for `step`, 100 columns wide."""
    style = Style(width=WIDTH, height=34, color=True, redraw=True)
    screen = Screen(Plan.from_json(folder.plan.read_bytes()), spent_by)
    events = [event for line in folder.events.read_bytes().splitlines() if (event := parse_event(line))]
    shown = [event for event in events if (event.step or 0) <= step]
    now = shown[-1].wall or 0.0
    records = [record for record in read_journal(folder.journal).records if record.wall <= now]
    log = folder.log.read_bytes().splitlines()
    last = next((n for n, line in enumerate(log) if line.startswith(f"step {step:04d}".encode())), len(log) - 1)
    screen.update(records, shown, log[: last + 1])
    return [[spell(span, style) for span in line] for line in live_screen(screen, style, now=now)]


def pictures() -> dict[Path, str]:
    """Return each picture's file with its content, and the README with the rehearsal's screen in its text."""
    drawings = {}
    for name, (record, step, caption) in PICTURES.items():
        lines = view(RunFolder(RECORDS / record), step)
        drawings[DOCS / name] = svg([*lines, [], [Span(f" {caption}", "warn")]] if caption else lines, WIDTH) + "\n"
        if not caption:
            block = _BLOCK.fullmatch(README.read_text(encoding="utf-8"))
            if block is None:
                sys.exit("README.md has no block of the live view.")
            drawings[README] = block[1] + as_text(lines) + block[3]
    return drawings


def as_text(lines: list[list[Span]]) -> str:
    """Return the screen without its log and its colours."""
    rows = ["".join(span.text for span in line).removeprefix(" ").rstrip() for line in lines]
    return "".join(f"{row}\n" for row in rows[: next(n for n, row in enumerate(rows) if row.startswith("── log"))])


def svg(lines: list[list[Span]], columns: int) -> str:
    """Return lines of styled spans as one SVG in the reader's own monospace font."""
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
    """Return one span at its cells, stretched to exactly their width in any font."""
    weight = ' font-weight="bold"' if span.look in ("title", "money", "bad") else ""
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{COLORS[span.look]}"{weight} textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(span.text)}</text>'
    )


def main(words: list[str]) -> None:
    """Draw one run, or all pictures of the repository."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    if words:
        sys.stdout.write(svg(view(RunFolder(Path(words[0])), int(words[1])), WIDTH))
        return
    for path, content in pictures().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
