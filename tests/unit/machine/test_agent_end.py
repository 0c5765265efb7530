"""Tests of ending a machine: the guard's deadline moves forward only, and the agent reads it back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Box

from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Order
from gpurun.lifecycle.steps.await_ready import NEVER_WALL
from gpurun.providers import guard
from gpurun.providers.base import Guarded
from gpurun.providers.local import LocalProvider
from gpurun.remote.client import FarSide
from gpurun.remote.local_machine import LocalMachine
from tests.refusals import lacking

DEADLINE_SH = Path(guard.__file__).with_name("deadline.sh").read_text()
LATER = 4_000_000_000


class Guard:
    """A guard's clock in a real shell. When its time is over, it writes the file `over` to its folder."""

    def __init__(self, folder: Path, words: list[str], deadline: int = LATER) -> None:
        self.folder = folder
        text = f'{DEADLINE_SH}\nbegin "{folder}" {deadline} 0\nend_in_time() {{ wait_for_it; : >"{folder}/over"; }}\n'
        self.child = subprocess.Popen(
            [*words, "-c", text + "lasting end_in_time"],
            env={"PATH": os.environ["PATH"], "GPURUN_GUARD_TICK_S": "0.2"}, start_new_session=True,
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        return (self.folder / "over").exists()

    def kill(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


@pytest.fixture(params=["sh", "busybox sh"])
def timer(tmp_path: Path, box: Box, request: pytest.FixtureRequest) -> Iterator[Guard]:
    words = request.param.split()
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed here; sh is tested")
    timer = Guard(tmp_path / "a guard", words)
    box.until(lambda: (timer.folder / "spent").exists())
    yield timer
    if timer.child.poll() is None:
        timer.kill()


def test_now_means_within_seconds(box: Box, timer: Guard) -> None:
    before = int(time.time())
    ended = box.far.end(str(timer.folder))
    assert ended.taken, ended
    assert ended.deadline is not None
    assert before <= ended.deadline <= time.time()
    box.until(lambda: timer.is_over, 5)
    assert box.far.end(str(timer.folder)).taken, "asked again, when nobody looks at the file any more"


def test_a_future_end_is_taken_and_read_back_and_no_later_one(box: Box, timer: Guard) -> None:
    soon = int(time.time()) + 3600
    assert box.far.end(str(timer.folder), soon + 0.9).deadline == soon
    later = box.far.end(str(timer.folder), soon + 900.0)
    assert (later.taken, later.deadline) == (True, soon)
    assert not timer.is_over


def test_a_guard_that_is_dead_has_taken_nothing(box: Box, timer: Guard) -> None:
    timer.kill()
    box.alter_agent("TAKEN_S, LOOK_S = 10.0, 12.0", "TAKEN_S, LOOK_S = 10.0, 0.5")
    ended = box.far.end(str(timer.folder))
    assert (ended.taken, ended.deadline) == (False, LATER)
    assert "guard" in ended.message


def test_a_machine_without_a_timer_says_so(box: Box, tmp_path: Path) -> None:
    ended = box.far.end(str(tmp_path / "none"))
    assert (ended.taken, ended.deadline) == (False, None)
    assert "no timer" in ended.message


def test_a_guard_is_armed_only_while_its_looks_show_it_alive(box: Box, timer: Guard) -> None:
    armed = box.far.end(str(timer.folder), NEVER_WALL)
    assert (armed.taken, armed.deadline) == (True, LATER)
    timer.kill()
    spent = timer.folder / "spent"
    os.utime(spent, (time.time() - 60, time.time() - 60))
    box.alter_agent("TAKEN_S, LOOK_S = 10.0, 12.0", "TAKEN_S, LOOK_S = 10.0, 0.5")
    dead = box.far.end(str(timer.folder), NEVER_WALL)
    assert (dead.taken, dead.deadline) == (False, LATER)
    assert not (timer.folder / "deadline").exists(), "it was only asked"


def test_a_time_that_cannot_be_written_is_said(box: Box, timer: Guard) -> None:
    (timer.folder / "deadline.new").mkdir()
    ended = box.far.end(str(timer.folder))
    assert not ended.taken
    assert lacking(ended.message, "deadline.new", "Is a directory") == []


def test_the_guard_of_this_machine_obeys_too(tmp_path: Path) -> None:
    clock, home = SystemClock(), Home(tmp_path / "home")
    here = LocalProvider(home, clock)
    (offer,) = here.offers(GpuNeed(name="any", count=1), ())
    token = "gr-fox-41-0011aabb"
    order = Order(run="fox-41", token=token, attempt=1, offer=offer, deadline_wall=clock.wall() + 600, lease_s=600)
    made = here.create(order)
    assert made.address is not None
    assert isinstance(here, Guarded)
    far = FarSide(LocalMachine(home.root / made.address.folder, token=token))
    far.install_agent()
    assert far.end(
        here.guard_folder(made), clock.wall() + 5
    ).taken  # With no delay, the guard would end this agent before it replies.
    limit = time.monotonic() + 30
    while here.read(made.id).state != "STOPPED" and time.monotonic() < limit:
        time.sleep(0.1)
    assert here.read(made.id).state == "STOPPED"
    assert json.loads((home.instances / token / "instance.json").read_bytes())["token"] == token
    here.destroy(made.id)
