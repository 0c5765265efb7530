"""Shows a run's new records and events: as a redrawn view on a terminal, as lines, as JSON Lines, or not at all."""

from __future__ import annotations

import signal
import sys
from typing import Protocol

from gpurun.cli.keyboard import Keyboard
from gpurun.cli.render import OutputLost, put
from gpurun.cli.session import Session
from gpurun.core.run_plan import Plan
from gpurun.ledger.spending import spent_by
from gpurun.readers.run_reader import News
from gpurun.view.live_state import Screen
from gpurun.view.live_window import LiveWindow
from gpurun.view.plain_lines import PlainView
from gpurun.view.style import probe


class Pane(Protocol):
    """Shows the new records and events of a run."""

    def show(self, news: News, now: float) -> None: ...

    def close(self) -> None: ...

    def reopen(self) -> None: ...

    def is_left(self) -> bool: ...


class LivePane:
    """Draws the live view on a terminal."""

    def __init__(self, plan: Plan, session: Session) -> None:
        self._screen = Screen(plan, spent_by)
        self._style = probe(sys.stderr, color=session.color)
        self._keyboard, self._takes_keys, self._helps = Keyboard(), not session.no_input, False
        self.reopen()

    def show(self, news: News, now: float) -> None:
        """Redraw with the news."""
        self._screen.update(news.records, news.events, news.log_lines, news.moving, news.heard_wall, news.gpus)
        self._window.show(self._screen, now=now, keys=self._keyboard.is_open, helps=self._helps)

    def is_left(self) -> bool:
        """Return whether q was pressed; a question mark toggles the explanation of the lines."""
        pressed = self._keyboard.pressed()
        self._helps ^= pressed.count("?") % 2 == 1
        return "q" in pressed

    def close(self) -> None:
        """Leave the last view on the screen, and restore the terminal."""
        self._keyboard.close()
        self._window.__exit__(None, None, None)

    def reopen(self) -> None:
        """Prepare the terminal for drawing again."""
        self._window = LiveWindow(sys.stderr, self._style)
        self._window.__enter__()
        if self._takes_keys:
            self._keyboard.open()


class SilentPane:
    """Shows nothing; for verbs that print a single envelope."""

    def show(self, news: News, now: float) -> None:
        """Do nothing: this pane shows nothing."""

    def close(self) -> None:
        """Do nothing: this pane does not change the terminal."""

    def reopen(self) -> None:
        """Do nothing: this pane does not change the terminal."""

    def is_left(self) -> bool:
        """Return False: this pane does not read keys."""
        return False


class PlainPane(SilentPane):
    """Prints a line per event on standard error."""

    def __init__(self, plan: Plan, session: Session) -> None:
        self._session = session
        self._view = PlainView(plan.job.terms, unicode=probe(sys.stderr).unicode)

    def show(self, news: News, now: float) -> None:
        """Print lines about the new records and events."""
        self._say(self._view.update(news.records, news.events, now, news.moving))

    def close(self) -> None:
        """Print the lines that were not printed yet."""
        self._say(self._view.rest(self._session.clock.wall()))

    def _say(self, lines: list[str]) -> None:
        try:
            for line in lines:
                self._session.say(line)
        except OSError:
            _hang_up()


class JsonPane(SilentPane):
    """Prints every record and event as JSON Lines on standard output; the envelope comes last."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def show(self, news: News, now: float) -> None:
        """Print the new records and events."""
        from gpurun.view.envelope import event_json, record_json

        try:
            for record in news.records:
                put(record_json(record))
            for event in news.events:
                put(event_json(event))
        except OutputLost as loss:
            if loss.why:
                self._session.say(f"Standard output cannot be written: {loss.why}.")
            _hang_up()


def _hang_up() -> None:
    """End the view as if the terminal had been closed, because standard output or error can no longer be written."""
    signal.raise_signal(signal.SIGHUP)


def open_pane(session: Session, plan: Plan, *, stream: bool) -> Pane:
    """Return the pane for this session; with --json, a pane that prints JSON Lines if `stream`, else a silent one."""
    if session.json:
        return JsonPane(session) if stream else SilentPane()
    live = probe(sys.stderr, color=session.color).redraw and not (session.no_progress or session.quiet)
    return LivePane(plan, session) if live else PlainPane(plan, session)
