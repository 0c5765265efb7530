"""Tests that no verb hangs or fails with a bug in a home where a pipe, device, hole or folder replaces a file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.paths import Home
from tests.command_line import gpurun
from tests.unit.ledger_samples import CloudRun

FILES = {
    "journal": "runs/fox-41/journal.jsonl", "plan": "runs/fox-41/plan.json", "request": "runs/fox-41/request.json",
    "receipt": "runs/fox-41/receipt.json", "lock": "runs/fox-41/run.lock", "events": "runs/fox-41/events.jsonl",
    "log": "runs/fox-41/run.log", "shutdown": "runs/fox-41/shutdown.json", "chain": "ledger.jsonl", "key": "keys/x.pub",
    "checkpoint": "runs/fox-41/artifacts/checkpoints/000120.model.safetensors", "moving": "runs/fox-41/moving.json",
    "request to stop": "runs/fox-41/control.json", "settings": "config.toml", "inventory": "runs/fox-41/inventory.json",
}  # fmt: skip
LONGEST_S = 10.0


@pytest.fixture
def home(own_home: Path) -> Iterator[Path]:
    """Yield a home with a finished run; a test that takes longer than LONGEST_S is interrupted."""
    CloudRun(Home(own_home).prepare(), "fox-41").until_gone().settle()

    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    yield own_home
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a hole", "a folder"])
@pytest.mark.parametrize("what", FILES)
def test_a_strangers_home_hangs_no_verb_and_eats_no_memory(what: str, kind: str, home: Path) -> None:
    path = home / FILES[what]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    for words in (["audit"], ["ps", "--all"], ["receipt", "fox-41"]):
        reply = json.loads(gpurun(*words, "--json").stdout)
        assert reply["exit_code"] != 1, (words, reply["errors"])
