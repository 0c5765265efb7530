"""Handles Ctrl-C, a closed terminal or a cancelled CI job; the effect depends on the run's phase, and is announced."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

from gpurun.cli.session import Session
from gpurun.core.clock import local_minute
from gpurun.core.errors import Interrupted
from gpurun.core.journal_events import Incident
from gpurun.core.journal_records import Event, Phase, Record
from gpurun.core.money import format_rate
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.run_state import waits_for_machine
from gpurun.ledger.runs import Sight, look_at_run
from gpurun.view.event_text import HEARD, SILENT

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BEFORE_TRAINING = (Phase.OPENED, Phase.CREATING, Phase.CREATED, Phase.READY, Phase.SHIPPED)
ATTACHED = "attached"
"""The value of `on_interrupt` for `attach`: a signal ends only the view, unless the user chooses to stop the run."""
RESUMED = "resumed"
"""The value of `on_interrupt` for `resume`: before training, a signal ends only the view; later it may stop the run."""
_GIVES_UP = ("ask", "stop")
_STOPPING = {
    True: "Stopping: saving a checkpoint, downloading it, then destroying the instance.",
    False: "Stopping: the command has --grace seconds to save, then its outputs are downloaded, and the instance ends.",
}


class Interrupts:
    """Collects signals, instead of ending the process, so that the viewer can react to them."""

    def __init__(self) -> None:
        self._heard: deque[int] = deque()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _HEARD:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(number)

    def take(self) -> int | None:
        """Return the next signal, or None; several signals in quick succession are all kept."""
        return self._heard.popleft() if self._heard else None


def react_to_signal(session: Session, sight: Sight, number: int, on_interrupt: str) -> bool:
    """React to a signal; return whether the viewer should leave the run. A stop is only requested from the supervisor.

    `on_interrupt` is `ask`, `detach` or `stop`, or ATTACHED or RESUMED for a view of a run that another command began.
    """
    phase = sight.state.phase
    if number == signal.SIGHUP:
        return True
    is_on_its_way = sight.state.leg > 1 or waits_for_machine(
        sight.state
    )  # The run is moving to another machine, so a stop would lose work.
    if phase in (*_BEFORE_TRAINING, Phase.GONE) and is_on_its_way:
        return _react_while_training(session, sight, number, on_interrupt)
    if phase in _BEFORE_TRAINING and not sight.state.start_asked:
        if on_interrupt not in _GIVES_UP:
            return True
        session.say("Training has not started, so the instance is being destroyed.")
        ask_to_stop(sight.folder, "now", by="signal", reason="interrupted before training", signal=_signal_name(number))
        return False
    if phase in (Phase.SHIPPED, Phase.TRAINING):  # In the phase SHIPPED, training may have begun too.
        return _react_while_training(session, sight, number, on_interrupt)
    if phase is Phase.TRAINED:
        session.say(f"The {sight.plan.job.terms.files} are being downloaded; that continues without this terminal.")
        return True
    if phase is Phase.HELD:
        session.say(f"The machine is held: {sight.state.hold_why}. That continues without this terminal.")
        return True
    if phase in (Phase.COLLECTED, Phase.DESTROYING):
        rate = format_rate(sight.plan.offer.rate_micros_per_hour)
        session.say(f"The machine is being destroyed; until then it may cost {rate}. Press Ctrl-C again to leave.")
        return False
    return False


def _react_while_training(session: Session, sight: Sight, number: int, on_interrupt: str) -> bool:
    """React to a signal during training; return whether the viewer should leave the run.

    If the user can answer, ask. Otherwise stop the run, because no user would resume it; with `detach` or ATTACHED,
    only leave the run.
    """
    if number == signal.SIGINT and on_interrupt in ("ask", ATTACHED, RESUMED) and session.interactive:
        wish = _ask_what_to_do(session, sight)
    else:
        wish = "d" if on_interrupt in ("detach", ATTACHED) else "s"
    if wish.startswith("d"):
        return True
    if wish.startswith("s"):
        session.say(_STOPPING[sight.plan.job.terms.has_model])
        ask_to_stop(sight.folder, "save", by="signal", reason="interrupted while training", signal=_signal_name(number))
    return False


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def costs_on(sight: Sight, now: float) -> str:
    """Return a phrase with the hourly cost of a run and its deadline; "" if the run costs nothing."""
    if waits_for_machine(sight.state):
        return "$0.00/h while it waits for a machine"
    rate, deadline = sight.plan.offer.rate_micros_per_hour, sight.state.deadline_wall
    if not rate:
        return ""
    return format_rate(rate) + (f", until {local_minute(deadline, now=now)} at the latest" if deadline else "")


def decide_on_silence(session: Session, sight: Sight, message: str) -> bool:
    """Ask what to do about a machine that has long been silent; return whether the viewer should leave the run.

    If the machine responds before the user answers, it is not destroyed.
    """
    session.say(f"{message[:1].upper()}{message[1:]}.")
    question = "[d]estroy it and lose its files  [l]eave this view  [k]eep waiting (Enter)"
    said = ask_user(session, question, flag="--give-up-after", on_interrupt="l")
    if said.startswith("d") and silence_of(look_at_run(session.home, sight.folder.name).records) is None:
        session.say("The machine responds again, so it is not destroyed.")
    elif said.startswith("d"):
        ask_to_stop(sight.folder, "destroy", by="user", reason="it did not answer")
    return said.startswith("l")


def silence_of(records: Iterable[Record]) -> Record | None:
    """Return the record of a machine's current silence, or None."""
    silence = None
    for record in records:
        code = record.typed.code if isinstance(record.typed, Incident) else ""
        if code == SILENT:
            silence = record
        elif code == HEARD or record.event is Event.TRAIN_OBSERVED:
            silence = None
    return silence


def _ask_what_to_do(session: Session, sight: Sight) -> str:
    costs = costs_on(sight, session.clock.wall())
    session.say(f"{sight.folder.name} continues without this terminal{f' ({costs})' if costs else ''}.")
    question = "[d]etach  [s]top, collect, destroy  [k]eep watching (Enter)"
    return ask_user(session, question, flag="--on-interrupt", on_interrupt="d")


def ask_user(session: Session, question: str, *, flag: str, on_interrupt: str) -> str:
    """Ask, and return the answer in lower case, or `on_interrupt` after Ctrl-C."""
    # Ctrl-C must end the question, but our own handler would only record it.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return session.ask(question, flag=flag).lower()
    except Interrupted:
        return on_interrupt
    finally:
        signal.signal(signal.SIGINT, heard)
