"""Tests of a machine that no client polls after its training: it ends itself only if its checkpoints are in the bucket.

The tests use a real keeper under the real agent, a guard's clock in a real shell, and a bucket; all waits are short.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.providers import guard
from gpurun.remote.client import FarSide
from gpurun.remote.local_machine import LocalMachine
from gpurun.remote.s3 import push_slots
from gpurun.remote.s3.s3_client import Bucket

DEADLINE_SH = Path(guard.__file__).with_name("deadline.sh").read_text()
PLACE, KEY = "team/gpt/runs/fox-41/gr-1", "k" * 64
LINGER_S = 3.0
WEIGHTS = b"weights" * 1000
SAVES = f"""
import json
os.makedirs("../out/checkpoints")
open("../out/checkpoints/000010.weights", "wb").write({WEIGHTS!r})
one = dict(name="checkpoints/000010.weights", bytes={len(WEIGHTS)}, kind="weights", step=10)
one["sha256"] = {hashlib.sha256(WEIGHTS).hexdigest()!r}
open("m", "w").write(json.dumps(dict(v=1, latest=10, best=None, files=[one])))
os.replace("m", "../out/MANIFEST.json")
"""


class Rented:
    """A machine with an agent and a timer. At its end it writes the file `over` instead of powering off."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.root, self.timer = folder / "run", folder / "guard"
        (self.root / "bundle").mkdir(parents=True)
        machine = LocalMachine(self.root, "gr-test-linger")
        self.far = FarSide(machine, python=sys.executable)
        self.far.install_agent()
        machine.put("agent/shipped.json", b'{"manifest_sha256": "by hand"}')
        order = push_slots.push_order(bucket, PLACE, run="fox-41", key=KEY, slot_bytes=2 << 20, seconds=3600)
        machine.put("agent/push.json", order)
        text = f'{DEADLINE_SH}\nbegin "{self.timer}" 4000000000 0\n'
        text += f'end_in_time() {{ wait_for_it; : >"{self.timer}/over"; }}\nlasting end_in_time'
        self.shell = subprocess.Popen(
            ["sh", "-c", text], env={"PATH": os.environ["PATH"], "GPURUN_GUARD_TICK_S": "0.2"}, start_new_session=True
        )

    def trains(self, script: str = SAVES, **changes: object) -> None:
        now = time.time()
        stops = {"soft_stop_s": 60, "hard_stop_s": 60, "soft_stop_wall": now + 60, "hard_stop_wall": now + 60}
        argv = [sys.executable, "-I", "-S", "-c", "import os, time\n" + script]
        job = {"v": 1, "run": "fox-41", "argv": argv, "cwd": "bundle", "env": {}, "save_s": 5, **stops, **changes}
        self.far.start(job)

    def lingers(self, script: str = SAVES) -> None:
        self.trains(script, linger_s=LINGER_S, guard_folder=str(self.timer))

    @property
    def is_over(self) -> bool:
        return (self.timer / "over").exists()

    def over_within(self, limit_s: float) -> bool:
        return any(self.is_over for _ in ticks(SystemClock(), 0.05, limit_s))

    def pushed(self) -> bool:
        path = self.root / "agent" / "pushed_places.json"
        return path.exists() and bool(json.loads(path.read_bytes())["sure"])

    @property
    def log(self) -> str:
        return (self.root / "agent" / "agent.log").read_text()


@pytest.fixture
def rented(bucket: Bucket, tmp_path: Path) -> Iterator[Rented]:
    machine = Rented(tmp_path, bucket)
    yield machine
    if not machine.is_over:
        os.killpg(machine.shell.pid, signal.SIGKILL)
    machine.shell.wait()
    machine.far.farewell()


OUTPUTS = SAVES.replace('kind="weights"', 'kind="output"').replace("latest=10", "latest=None")


@pytest.mark.parametrize("script", [SAVES, OUTPUTS], ids=["a checkpoint", "a command's outputs"])
def test_a_machine_ends_when_all_is_pushed_and_nothing_asks(rented: Rented, script: str) -> None:
    began = time.monotonic()
    rented.lingers(script)
    assert rented.over_within(30), rented.log
    assert time.monotonic() - began >= LINGER_S
    assert rented.pushed()
    assert "ends itself" in rented.log


def test_a_client_that_asks_is_waited_for_anew(rented: Rented) -> None:
    rented.lingers()
    for _ in ticks(SystemClock(), 0.5, 3 * LINGER_S):
        assert rented.far.poll({}).status.state in ("running", "exited")
    assert not rented.is_over
    assert rented.over_within(30), rented.log


def test_a_machine_that_was_not_told_stays(rented: Rented) -> None:
    rented.trains()
    assert any(rented.pushed() for _ in ticks(SystemClock(), 0.1, 30))
    assert not rented.over_within(LINGER_S + 3.0)


def test_a_machine_without_a_checkpoint_is_kept(rented: Rented) -> None:
    """The log says why there is no checkpoint, and only the machine has the log."""
    rented.lingers("raise SystemExit(3)\n")
    assert not rented.over_within(LINGER_S + 3.0)
    assert "deadline" in rented.log
