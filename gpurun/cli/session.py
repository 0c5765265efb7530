"""One invocation: the home, the clock, and how this terminal wants to be spoken to."""

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
    """The common flags of every verb, and what follows from them."""

    home: Home
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    no_input: bool = False
    no_progress: bool = False
    typed: frozenset[str] = frozenset()
    """The flags of the verb that stood on the command line, by their parameters' names."""
    clock: Clock = field(default_factory=SystemClock)

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings of this home and folder."""
        from gpurun.core.settings import load_settings

        return load_settings(self.home, project=Path.cwd(), environment=os.environ)

    @cached_property
    def bounds(self) -> Bounds | None:
        """The bounds of the mandate that this was started with; None without one, an error where it does not hold."""
        if MANDATE_VARIABLE not in os.environ:
            return None
        from gpurun.ledger.mandate import MandateBudget, mandate_here
        from gpurun.planning.mandate_bounds import Bounds

        mandate = mandate_here(self.home)
        return Bounds(mandate, MandateBudget(self.home, self.clock, mandate.id), self.home) if mandate else None

    def desk(self, run: str) -> Desk:
        """Return where a run of that name is planned."""
        from gpurun.planning.place import Desk

        return Desk(run, self.home, self.clock, self.talk_when_slow(), self.interactive, self.bounds)

    @cached_property
    def style(self) -> Style:
        """What standard output can carry."""
        from gpurun.view.style import probe

        return probe(sys.stdout, color=self.color)

    def draw(self, lines: Iterable[Line]) -> str:
        """Styled lines as standard output can carry them."""
        from gpurun.view.styled_text import render

        return render(lines, self.style)

    @property
    def interactive(self) -> bool:
        """Whether a person can be asked: both ends are a terminal, and nothing forbids it."""
        return not (self.no_input or self.json) and sys.stdin.isatty() and sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Talk to the person: standard error, unless they wanted quiet."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def ring(self, text: str) -> None:
        """Ring the terminal's bell and have it notify (OSC 9), unless somebody wants quiet."""
        from gpurun.core.untrusted import safe_line

        if self.interactive and not self.quiet:
            print(f"\a\x1b]9;{safe_line(text)}\x1b\\", end="", file=sys.stderr, flush=True)

    def talk_when_slow(self, after_s: float = 2.0) -> Callable[[str], None]:
        """Talk about work that is usually quick: at once with --verbose, else only once it has taken a while."""
        began = self.clock.monotonic()

        def talk(text: str) -> None:
            if self.verbose or self.clock.monotonic() - began > after_s:
                self.say(text)

        return talk

    def ask(self, question: str, *, flag: str) -> str:
        """Ask on the terminal; where nobody can answer, a UsageError names the flag that would have."""
        if not self.interactive:
            raise UsageError("input.needed", f"An answer is needed: {question}", hint=f"Give it as {flag}.")
        try:
            print(question, end=" ", file=sys.stderr, flush=True)
            return sys.stdin.readline().strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            what = "Interrupted at the question: nothing was begun, and nothing spent."
            raise Interrupted("input.interrupted", what, hint="Run it again.") from None
