"""Shows the progress of long work on standard error: a redrawn line, or a line every few seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from gpurun.cli.session import Session
from gpurun.view.shard_lines import progress_line
from gpurun.view.style import probe
from gpurun.view.styled_text import clip_line, render

_PLAIN_PERIOD_S = 10.0


class ProgressBar:
    """Redraws a line on a terminal; elsewhere prints a line every few seconds. Silent with --json or --quiet."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._style = probe(sys.stderr, color=session.color)
        self._redraws = self._style.redraw and not (session.no_progress or session.json or session.quiet)
        self._began: tuple[float, int] | None = None
        self._due = 0.0
        self._drawn = ""

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.end()
        if not self._session.json:
            self._session.say(text)

    def show(self, figures: Mapping[str, int]) -> None:
        """Draw the progress; the remaining time is estimated only from work done by this command."""
        now = self._session.clock.monotonic()
        self._began = self._began or (now, figures["done_bytes"])
        if now < self._due or self._session.json:
            return
        since, done_before = self._began
        line = progress_line(figures, elapsed_s=now - since, done_before=done_before, style=self._style)
        if self._redraws:
            # A wrapped line cannot be redrawn, and a terminal may become narrower at any time.
            style = probe(sys.stderr, color=self._session.color)
            shown = render([clip_line(line, style.width - 1, style)], style)
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
            self._drawn = "\n" if figures["done_bytes"] > done_before else "\r\x1b[K"
        elif figures["done_bytes"] > done_before:
            self._session.say(render([line], self._style))
            self._due = now + _PLAIN_PERIOD_S

    def end(self) -> None:
        """End the line; erase it if it shows no progress."""
        print(self._drawn, end="", file=sys.stderr, flush=True)
        self._drawn = ""
