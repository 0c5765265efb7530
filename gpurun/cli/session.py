"""Defines the context of one command: the home, the clock, the settings, and the output style."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.core.clock import Clock, SystemClock
from gpurun.core.errors import Interrupted, UsageError
from gpurun.core.paths import MANDATE_VARIABLE, Home

if TYPE_CHECKING:
    from gpurun.core.settings import Setting
    from gpurun.planning.mandate_bounds import Bounds
    from gpurun.planning.place import Desk
    from gpurun.view.style import Style
    from gpurun.view.styled_text import Line


@dataclass(frozen=True)
class Session:
    """The flags that all commands share, and values derived from them."""

    home: Home
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    no_input: bool = False
    no_progress: bool = False
    typed: frozenset[str] = frozenset()
    """The parameter names of the flags that were typed."""
    clock: Clock = field(default_factory=SystemClock)

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """Return the settings of this home and of the working folder."""
        from gpurun.core.settings import load_settings

        return load_settings(self.home, project=Path.cwd(), environment=os.environ)

    @cached_property
    def bounds(self) -> Bounds | None:
        """Return the bounds of this process's mandate; None without a mandate. UsageError if the mandate is invalid."""
        if MANDATE_VARIABLE not in os.environ:
            return None
        from gpurun.ledger.mandate import MandateBudget, mandate_here
        from gpurun.planning.mandate_bounds import Bounds

        mandate = mandate_here(self.home)
        return Bounds(mandate, MandateBudget(self.home, self.clock, mandate.id), self.home) if mandate else None

    def desk(self, run: str) -> Desk:
        """Return the Desk with which a run of this name is planned."""
        from gpurun.planning.place import Desk

        return Desk(run, self.home, self.clock, self.talk_when_slow(), self.interactive, self.bounds)

    @cached_property
    def style(self) -> Style:
        """Return the style that standard output supports."""
        from gpurun.view.style import probe

        return probe(sys.stdout, color=self.color)

    def draw(self, lines: Iterable[Line]) -> str:
        """Render styled lines for standard output."""
        from gpurun.view.styled_text import render

        return render(lines, self.style)

    @property
    def interactive(self) -> bool:
        """Return whether the user can be asked: input and error output are terminals, and no flag forbids questions."""
        return not (self.no_input or self.json) and sys.stdin.isatty() and sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Print to standard error, unless --quiet is set."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def ring(self, text: str) -> None:
        """Ring the terminal's bell and show a desktop notification (OSC 9), unless --quiet is set."""
        from gpurun.core.untrusted import safe_line

        if self.interactive and not self.quiet:
            print(f"\a\x1b]9;{safe_line(text)}\x1b\\", end="", file=sys.stderr, flush=True)

    def talk_when_slow(self, after_s: float = 2.0) -> Callable[[str], None]:
        """Return a function that prints progress only with --verbose, or after `after_s` seconds have passed."""
        began = self.clock.monotonic()

        def talk(text: str) -> None:
            if self.verbose or self.clock.monotonic() - began > after_s:
                self.say(text)

        return talk

    def ask(self, question: str, *, flag: str) -> str:
        """Ask on the terminal, and return the answer; UsageError, which names `flag`, if the user cannot be asked."""
        if not self.interactive:
            raise UsageError("input.needed", f"An answer is needed: {question}", hint=f"Give it as {flag}.")
        try:
            print(question, end=" ", file=sys.stderr, flush=True)
            return sys.stdin.readline().strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            what = "Interrupted at the question: nothing was started or spent."
            raise Interrupted("input.interrupted", what, hint="Run it again.") from None
