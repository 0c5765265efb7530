"""Tests of `train --detach`, which waits for the machine, and of `wait`, which waits for the end of the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.cli.interrupts import Interrupts
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.waiting import wait_until_ready
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode
from gpurun.core.paths import Home
from gpurun.ledger.run_lock import RunLock
from tests.command_line import gpurun
from tests.unit.ledger_samples import CloudRun, finished_run


@pytest.fixture
def created(own_home: Path) -> CloudRun:
    """Return a run whose machine is created but not ready."""
    run = CloudRun(Home(own_home).prepare())
    return run.write(run.opened(), run.intended(), run.created())


@pytest.fixture
def driven(created: CloudRun) -> Iterator[CloudRun]:
    with RunLock(created.folder.lock):
        yield created


@pytest.fixture(autouse=True)
def nobody_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("lifecycle.supervisor", "cli.viewer"):
        monkeypatch.setattr(f"gpurun.{room}.start_supervisor", lambda *_: pytest.fail("a supervisor was started"))


def awaited(run: CloudRun, clock: VirtualClock | None = None) -> Result:
    with Interrupts() as heard:
        return wait_until_ready(Session(run.home, clock=clock or VirtualClock()), run.folder, "ask", heard)


class Eventful(VirtualClock):
    """A clock that calls `what` in its tenth pause, and fails in its hundredth."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.pauses, self.what = 0, what

    def sleep(self, seconds: float) -> None:
        self.pauses += 1
        assert self.pauses < 100, "it waits for ever"
        if self.pauses == 10:
            self.what()  # type: ignore[operator]
        super().sleep(seconds)


def test_a_detached_train_returns_just_when_its_machine_is_ready(driven: CloudRun) -> None:
    clock = Eventful(lambda: driven.write(next(driven.through_training())[1]))
    left = awaited(driven, clock)
    assert (left.exit_code, clock.pauses) == (ExitCode.DONE, 10)
    assert "gpurun attach fox-41" in left.after


def test_a_dead_supervisors_machine_may_be_billing_and_says_so(created: CloudRun) -> None:
    """gpurun once said only that the run continues, although no supervisor drove it and its machine was billed."""
    left = awaited(created)
    assert left.exit_code is ExitCode.MAY_BE_BILLING
    assert "fox-41" in left.errors[0].what
    assert "gpurun resume fox-41" in left.errors[0].hint


def test_a_run_that_is_over_before_that_is_told_as_it_ended(own_home: Path) -> None:
    folder = finished_run(Home(own_home).prepare())
    with Interrupts() as heard:
        ended = wait_until_ready(Session(Home(own_home)), folder, "ask", heard)
    assert (ended.exit_code, ended.data["outcome"]) == (ExitCode.DONE, "done")


def test_ctrl_c_meanwhile_gives_up_the_machine_as_in_live_view(driven: CloudRun) -> None:
    def pressed() -> None:
        signal.raise_signal(signal.SIGINT)
        driven.write(next(driven.through_training())[1])

    with pytest.raises(AssertionError, match="it waits for ever"):  # No supervisor ends it here.
        awaited(driven, Eventful(pressed))
    assert driven.folder.control.exists()


def test_it_warns_that_a_containers_end_kills_the_supervisor(
    driven: CloudRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    driven.write(next(driven.through_training())[1])
    first = tmp_path / "comm"
    monkeypatch.setattr("gpurun.cli.waiting._FIRST", first)
    said = {}
    for parent, name in ((1, "sh"), (1, "systemd"), (77, "sh")):
        first.write_text(f"{name}\n")
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        awaited(driven)
        said[parent, name] = "gpurun wait fox-41" in capsys.readouterr().err
    assert said == {(1, "sh"): True, (1, "systemd"): False, (77, "sh"): False}


def test_wait_ends_with_the_runs_own_code_and_draws_nothing(own_home: Path) -> None:
    run = CloudRun(Home(own_home).prepare()).until_gone().settle(exit_code=7)
    waited = gpurun("wait", run.folder.name)
    assert (waited.returncode, "Receipt fox-41" in waited.stdout, "step" in waited.stderr) == (7, True, False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 8)])
def test_a_signal_ends_the_waiting_and_leaves_the_run(
    driven: CloudRun, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr("gpurun.core.clock.SystemClock.sleep", lambda *_: signal.raise_signal(number))
    waited = gpurun("wait", "--json")
    answer = json.loads(waited.stdout)
    assert (waited.returncode, answer["errors"][0]["code"]) == (code, "wait.interrupted")
    assert not driven.folder.control.exists()
