"""Tests in real time that a request to end the machine is obeyed within seconds, whichever call hangs."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace

import pytest

from gpurun.cli import run_control
from gpurun.cli.app import build_app, run_app
from gpurun.core.background_call import Background
from gpurun.core.clock import SystemClock, ticks
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.stop_request import ask_to_stop
from gpurun.lifecycle import driver
from gpurun.lifecycle.context import BETWEEN_S, Context
from gpurun.lifecycle.instance import monitor, terminate
from gpurun.lifecycle.steps import close_run
from gpurun.providers.local import LocalProvider
from tests.emulators.fake import cloud
from tests.lifecycle import tiny_runs
from tests.lifecycle.scripted_cloud import ScriptedCloud, ScriptedFar, World

LIMIT_S = 10.0
HANGING = [
    "before find", "before read", "far.install_agent", "far.set_up", "far.hello", "far.unpack", "far.start", "far.poll",
    "far.manifest", "far.get checkpoints/000030.model.safetensors",
]  # fmt: skip


class RealWorld(World):
    """A run on the scripted cloud in real time. After the create, the first call named `hanging` waits for `let_go`."""

    def __init__(self, home: Home, hanging: str) -> None:
        super().__init__(home)
        self.clock = SystemClock()  # type: ignore[assignment]
        self.cloud = ScriptedCloud(self.clock)
        self.cloud.profile = replace(self.cloud.profile, boot_s=0.0)
        self.cloud.traits = replace(self.cloud.traits, death_spread_s=0.2, poll_s=0.1, settle_s=1.0)
        self.far = ScriptedFar(self.cloud)
        self.far.train_s, self.far.get_s = 0.2, 0.01
        self.hanging, self.hangs, self.let_go = hanging, threading.Event(), threading.Event()
        self.asked_mono, self.made = float("inf"), False
        self._pass, self.cloud.passing = self.cloud.passing, self._passing

    def _passing(self, place: str) -> None:
        self.made = self.made or place == "after create"
        if self.made and place.endswith(self.hanging) and not self.hangs.is_set():
            self.hangs.set()
            self.let_go.wait(30)
        if place == "before destroy":
            self.asked_mono = min(self.asked_mono, self.clock.monotonic())
        self._pass(place)

    @property
    def context(self) -> Context:
        return replace(super().context, begin=Background)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "CALL_S", 0.01)
    monkeypatch.setattr("tests.lifecycle.scripted_cloud.CALL_S", 0.01)
    monkeypatch.setattr(driver, "ABANDON_AFTER_S", 0.4)
    monkeypatch.setattr(terminate, "LIST_FIRST_S", 0.4)
    monkeypatch.setattr(terminate, "TICK_S", 0.1)
    monkeypatch.setattr(close_run, "CLEAR_POLL_S", 0.05)


def test_all_that_is_waited_for_in_turn_is_less_than_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert driver.ABANDON_AFTER_S + driver.TICK_S + BETWEEN_S + terminate.LIST_FIRST_S < LIMIT_S


@pytest.mark.parametrize("hanging", HANGING)
def test_the_destroy_is_sent_although_a_call_hangs(own: Home, hanging: str) -> None:
    world = RealWorld(own, hanging)
    if hanging == "far.set_up":
        tiny_runs.setting_up(world.folder, "sleep 600", limit_s=600)
    driven = Background(world.drive)
    assert world.hangs.wait(20)
    asked_mono = world.clock.monotonic()
    ask_to_stop(world.folder, "destroy", by="user", reason="a test")
    for _ in ticks(world.clock, 0.05, LIMIT_S):
        if world.asked_mono < float("inf"):
            break
    took_s = world.asked_mono - asked_mono
    assert took_s < 0.4 + driver.TICK_S + BETWEEN_S + 0.4 + 1.0
    assert driven.wait(20)
    world.let_go.set()
    assert driven.result() is ExitCode.INTERRUPTED
    assert world.cloud.alive == []


def test_a_second_machine_is_ended_although_a_call_hangs(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    world = RealWorld(own, "far.poll")
    world.cloud.creates = ["made twice"]
    world.cloud.list_lag_s = 1.5
    monkeypatch.setattr(monitor, "SOON_S", 0.3)
    monkeypatch.setattr(monitor, "LATER_S", 0.3)
    driven = Background(world.drive)
    assert world.hangs.wait(20)
    for _ in ticks(world.clock, 0.05, LIMIT_S):
        if len(world.cloud.alive) == 1:
            break
    assert len(world.cloud.alive) == 1
    world.let_go.set()
    assert driven.wait(20)
    assert world.cloud.alive == []


def test_a_destroy_during_an_open_create_follows_its_answer(own: Home) -> None:
    world = RealWorld(own, "after create")
    driven = Background(world.drive)
    assert world.hangs.wait(20)
    ask_to_stop(world.folder, "destroy", by="user", reason="a test")
    world.clock.sleep(0.5)
    assert world.asked_mono == float("inf")
    answered_mono = world.clock.monotonic()
    world.let_go.set()
    assert driven.wait(20)
    assert world.asked_mono - answered_mono < 1.0
    assert driven.result() is ExitCode.INTERRUPTED
    assert world.cloud.alive == []


def test_a_silent_supervisor_keeps_no_machine_from_its_end(
    own: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor is frozen: the command itself must end the machine, and say why the receipt must wait."""
    tiny_runs.make_run(own, steps=100_000)
    supervisor = tiny_runs.start(own)
    for _ in ticks(SystemClock(), 0.05, 30):
        if "train.started" in tiny_runs.events_of(own.run("fox-41")):
            break
    supervisor.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(run_control, "ANSWER_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["gpurun", "destroy", "fox-41", "--yes", "--home", str(own.root)])
    assert run_app(build_app()) == 12
    assert LocalProvider(own, SystemClock()).find(None) == []
    assert "[supervisor.silent]" in capsys.readouterr().err
    supervisor.kill()
    supervisor.communicate()
    assert tiny_runs.drive(own).returncode == int(ExitCode.INTERRUPTED)


def test_a_machine_gone_in_a_hanging_destroy_is_billed_no_more(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the destroy call hangs after the machine is gone, the rest of the call must not count as billed time."""
    monkeypatch.setattr(terminate, "LOOK_EVERY_S", 0.1)
    world = RealWorld(own, "after destroy")
    driven = Background(world.drive)
    assert world.hangs.wait(20)
    world.clock.sleep(2.0)
    world.let_go.set()
    assert driven.wait(20)
    assert driven.result() is ExitCode.DONE
    assert world.all_of(Event.DEATH_READ)[0]["gone_s_ago"] >= 1.5
