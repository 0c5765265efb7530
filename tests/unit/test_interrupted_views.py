"""Tests of a signal to a view of a run: only `train` gives up a machine, and only before its training starts."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.cli.interrupts import react_to_signal
from gpurun.cli.panes import SilentPane
from gpurun.cli.session import Session
from gpurun.cli.viewer import Viewer
from gpurun.core.clock import VirtualClock
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home
from gpurun.core.run_plan import Mode
from gpurun.core.stop_request import read_stop_request
from gpurun.ledger.journal import Journal
from gpurun.ledger.runs import Sight, look_at_run
from gpurun.view.event_text import HEARD, SILENT
from tests.lifecycle.tiny_runs import make_run

BEFORE = [Phase.OPENED, Phase.CREATING, Phase.CREATED, Phase.READY, Phase.SHIPPED]


def seen_in(home: Home, phase: Phase, *, start_asked: bool = False) -> Sight:
    sight = look_at_run(home, "fox-41")
    return replace(sight, state=sight.state.model_copy(update={"phase": phase, "start_asked": start_asked}))


def interrupted(words: list[str], phase: Phase, number: int, home: Path, patch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a verb that receives one signal, and assert that the signal ends the verb."""
    make_run(Home(home))
    heard = iter([number])
    patch.setattr("gpurun.cli.viewer.Interrupts.take", lambda self: next(heard))
    patch.setattr("gpurun.cli.viewer.look_at_run", lambda home, name: seen_in(home, phase))
    patch.setattr("gpurun.lifecycle.supervisor.start_supervisor", lambda *given: None)
    patch.setattr(sys, "argv", ["gpurun", *words, "fox-41"])
    return run_app(build_app())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("phase", BEFORE)
@pytest.mark.parametrize("verb", ["attach", "resume"])
def test_a_view_of_a_run_that_boots_or_ships_ends_alone(
    verb: str, phase: Phase, number: int, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interrupted([verb], phase, number, own_home, monkeypatch) == 8
    assert read_stop_request(Home(own_home).run("fox-41")) is None


@pytest.mark.parametrize("terminal", [True, False], ids=["on a terminal", "off it"])
def test_an_attached_view_that_is_killed_leaves_a_training_run(
    terminal: bool, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "interactive", property(lambda self: terminal))
    assert interrupted(["attach"], Phase.TRAINING, signal.SIGTERM, own_home, monkeypatch) == 8
    assert read_stop_request(Home(own_home).run("fox-41")) is None


@pytest.mark.parametrize("phase", BEFORE)
@pytest.mark.parametrize(("on_interrupt", "leaves"), [("ask", False), ("stop", False), ("detach", True)])
def test_train_gives_up_what_has_nothing_to_lose_unless_detached(
    on_interrupt: str, leaves: bool, phase: Phase, own_home: Path
) -> None:
    home = Home(own_home)
    folder = make_run(home)
    assert react_to_signal(Session(home), seen_in(home, phase), signal.SIGINT, on_interrupt) is leaves
    request = read_stop_request(folder)
    assert (request.how if request else None) == (None if leaves else "now")


@pytest.mark.parametrize("phase", [Phase.SHIPPED, Phase.TRAINING])
@pytest.mark.parametrize("on_interrupt", ["stop", "resumed"])
def test_off_a_terminal_a_training_run_stops_with_a_checkpoint(on_interrupt: str, phase: Phase, own_home: Path) -> None:
    """Once a start was requested, hours of training may exist, as behind a closed lid: the signal must save them."""
    home = Home(own_home)
    folder = make_run(home)
    sight = seen_in(home, phase, start_asked=True)
    assert react_to_signal(Session(home), sight, signal.SIGTERM, on_interrupt) is False
    request = read_stop_request(folder)
    assert request is not None
    assert (request.how, request.signal) == ("save", "SIGTERM")


def test_ctrl_c_at_the_price_question_is_free_and_not_a_refusal(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may continue after an `n` (exit code 3), but must end at Ctrl-C (130), like any shell command."""
    monkeypatch.setattr(Session, "interactive", property(lambda self: True))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=Mock(side_effect=KeyboardInterrupt)))
    priced = Mock(worst_micros=4_000_000, most_micros=4_000_000, mode=Mode.PAID)
    priced.job.python, priced.choices.keep_going = "", False
    monkeypatch.setattr("gpurun.cli.commands.plan.plan_run", lambda *_, **__: priced)
    monkeypatch.setattr("gpurun.cli.commands.plan.render_plan", lambda *_: "the plan")
    monkeypatch.setattr(sys, "argv", ["gpurun", "train", "mini-gpt", "--max-cost", "5"])
    assert run_app(build_app()) == 130
    question, _, said = capsys.readouterr().err.partition("[y/N]")
    assert "$4" in question
    assert "[input.interrupted]" in said
    assert Home(own_home).run_names() == []


@pytest.mark.parametrize(
    ("typed", "comes_back", "asked_for", "leaves"),
    [("d", False, "destroy", False), ("d", True, None, False), ("l", False, None, True), ("", False, None, False)],
    ids=["destroy", "destroy, and meanwhile it answers again", "leave", "keep waiting"],
)
def test_a_person_is_asked_after_each_twenty_minutes_of_silence(
    typed: str, comes_back: bool, asked_for: str | None, leaves: bool, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, clock, asked = Home(own_home), VirtualClock(), list[float]()
    folder = make_run(home)
    silence = {"code": SILENT, "message": "the machine has not answered since 04:50 UTC", "since_wall": clock.wall()}
    journal = Journal.open(folder.journal, clock)
    journal.write(Event.INCIDENT, silence)

    def answer(session: Session, question: str, *, flag: str) -> str:
        asked.append(clock.monotonic())
        if comes_back:
            journal.write(Event.INCIDENT, {"code": HEARD, "message": "the machine answers again"})
        return typed

    monkeypatch.setattr(Session, "ask", answer)
    viewer = Viewer(Session(home, clock=clock), folder, "ask", pane=SilentPane())
    viewer._note_silence(look_at_run(home, "fox-41").records)
    began, left = clock.monotonic(), None
    while clock.monotonic() - began < 45 * 60 and left is None:
        left = viewer._ask_about_silence()
        clock.sleep(30)
    assert [round((at - began) / 60) for at in asked] == ([20] if leaves else [20, 40])
    request = read_stop_request(folder)
    assert (request.how if request else None) == asked_for
    assert (left is not None) is leaves
