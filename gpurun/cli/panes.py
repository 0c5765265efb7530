"""Where a viewer shows what it reads: redrawn on a terminal, in lines, as JSON Lines, or nowhere."""

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
    """Where news are shown."""

    def show(self, news: News, now: float) -> None: ...

    def close(self) -> None: ...

    def reopen(self) -> None: ...

    def is_left(self) -> bool: ...


class LivePane:
    """The live view on a terminal."""

    def __init__(self, plan: Plan, session: Session) -> None:
        self._screen = Screen(plan, spent_by)
        self._style = probe(sys.stderr, color=session.color)
        self._keyboard, self._takes_keys, self._helps = Keyboard(), not session.no_input, False
        self.reopen()

    def show(self, news: News, now: float) -> None:
        """Redraw with what is new."""
        self._screen.update(news.records, news.events, news.log_lines, news.moving, news.heard_wall, news.gpus)
        self._window.show(self._screen, now=now, keys=self._keyboard.is_open, helps=self._helps)

    def is_left(self) -> bool:
        """Whether q was pressed; a question mark shows what the lines mean, and hides it again."""
        pressed = self._keyboard.pressed()
        self._helps ^= pressed.count("?") % 2 == 1
        return "q" in pressed

    def close(self) -> None:
        """Leave the last picture standing, and give the terminal back."""
        self._keyboard.close()
        self._window.__exit__(None, None, None)

    def reopen(self) -> None:
        """Take the terminal again."""
        self._window = LiveWindow(sys.stderr, self._style)
        self._window.__enter__()
        if self._takes_keys:
            self._keyboard.open()


class SilentPane:
    """Nothing until the end: for verbs whose answer is one envelope."""

    def show(self, news: News, now: float) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing is held."""

    def reopen(self) -> None:
        """Nothing was given back."""

    def is_left(self) -> bool:
        """No keys are heard."""
        return False


class PlainPane(SilentPane):
    """One line an event on standard error."""

    def __init__(self, plan: Plan, session: Session) -> None:
        self._session = session
        self._view = PlainView(plan.job.terms, unicode=probe(sys.stderr).unicode)

    def show(self, news: News, now: float) -> None:
        """Print what is new."""
        self._say(self._view.update(news.records, news.events, now, news.moving))

    def close(self) -> None:
        """Print what was held back."""
        self._say(self._view.rest(self._session.clock.wall()))

    def _say(self, lines: list[str]) -> None:
        try:
            for line in lines:
                self._session.say(line)
        except OSError:
            _leave()


class JsonPane(SilentPane):
    """JSON Lines on standard output: every record and every event as it comes; the envelope comes last."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def show(self, news: News, now: float) -> None:
        """Print what is new."""
        from gpurun.view.envelope import event_json, record_json

        try:
            for record in news.records:
                put(record_json(record))
            for event in news.events:
                put(event_json(event))
        except OutputLost as loss:
            if loss.why:
                self._session.say(f"Standard output cannot be written: {loss.why}.")
            _leave()


def _leave() -> None:
    """Nobody reads any more: as when a terminal is closed, the view ends, and the run's own code is not 0."""
    signal.raise_signal(signal.SIGHUP)


def open_pane(session: Session, plan: Plan, *, stream: bool) -> Pane:
    """The pane that fits this session."""
    if session.json:
        return JsonPane(session) if stream else SilentPane()
    live = probe(sys.stderr, color=session.color).redraw and not (session.no_progress or session.quiet)
    return LivePane(plan, session) if live else PlainPane(plan, session)
