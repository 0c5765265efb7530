"""Tests that the agent notices a job that writes nothing or does nothing, and ends it if its order asks for that."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Box

from gpurun.remote.messages import Status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of processes is read in /proc")

HANGS = "print('step 1'); time.sleep(60)"
BURNS = "print('step 1')\nwhile True: pass"
DOTS = """
for _ in range(30):
    sys.stdout.write('.'); sys.stdout.flush()
    time.sleep(0.3)
"""
GROWS = """
for _ in range(30):
    open('train.bin', 'ab').write(b'x' * 10)
    time.sleep(0.3)
"""
DOWNLOADS = """
with open(os.environ['CACHE'] + '/model.incomplete', 'ab', buffering=0) as file:
    for _ in range(30):
        file.write(b'x' * 10)
        time.sleep(0.3)
"""
TRACKED = """
os.mkdir('wandb')
log = open('wandb/run-7.wandb', 'ab', buffering=0)
while True:
    log.write(b'x' * 10)
    time.sleep(0.1)
"""
SAVES = """
def save(*_):
    open('saved', 'w').write('yes')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('up')
while True: time.sleep(1)
"""


def scripted_card(folder: Path, percent: str) -> str:
    """Write an nvidia-smi with one card at this use in percent; return a PATH on which it is first."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in *compute-apps*) ;; *) echo "{percent}, 100, 1000, 40, 99" ;; esac\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def silent(box: Box) -> Status | None:
    status = box.status()
    return status if status.silent_since_wall is not None else None


@pytest.mark.parametrize("script", [DOTS, GROWS, DOWNLOADS], ids=["dots", "a growing file", "a download elsewhere"])
def test_a_job_that_writes_anything_is_neither_silent_nor_idle(box: Box, tmp_path: Path, script: str) -> None:
    box.far.start({**box.job(script, CACHE=str(tmp_path)), "idle_s": 2.4, "silent_s": 2.4})
    while (status := box.status()).state == "running":
        assert status.silent_since_wall is None
        time.sleep(0.3)
    assert (status.exit_code, status.stop_reason) == (0, None)


def test_a_hanging_job_is_reported_then_asked_to_save_and_stop(box: Box) -> None:
    began_wall = time.time()
    box.far.start({**box.job(SAVES), "idle_s": 3})
    status = box.until(lambda: silent(box))
    assert began_wall <= status.silent_since_wall <= status.wall - 1
    status = box.until_exited()
    assert (status.exit_code, status.stop_reason, box.text("saved")) == (0, "idle", "yes")


def test_a_busy_wordless_job_is_silent_not_idle_and_ends_by_that(box: Box) -> None:
    box.far.start({**box.job(BURNS), "idle_s": 1, "silent_s": 4})
    assert box.until(lambda: silent(box)).state == "running"
    status = box.until_exited()
    assert (status.stop_reason, status.signal) == ("silent", 15)


@pytest.mark.parametrize(("percent", "reason"), [("100", "silent"), ("3", "idle"), ("[N/A]", "idle")])
def test_a_stuck_collective_is_silent_with_cards_at_100_percent(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: str, reason: str
) -> None:
    monkeypatch.setenv("PATH", scripted_card(tmp_path / "bin", percent))
    box.far.start({**box.job(HANGS), "idle_s": 2, "silent_s": 4})
    assert box.until_exited().stop_reason == reason


def test_what_a_tracker_logs_by_itself_shows_no_sign_of_life(box: Box) -> None:
    box.far.start({**box.job(TRACKED), "idle_s": 2})
    assert box.until_exited().stop_reason == "idle"


def test_without_limits_a_silent_job_is_left_to_its_lease(box: Box) -> None:
    box.alter_agent("LOOK_S, QUIET_S = 15.0, 600.0", "LOOK_S, QUIET_S = 0.2, 1.0")
    box.far.start({**box.job(HANGS, soft_s=4), "idle_s": 0, "silent_s": 0})
    assert box.until(lambda: silent(box)).state == "running"
    assert box.until_exited().stop_reason == "lease"


@pytest.mark.parametrize("wrong", [-1, "60", 1e13, None])
def test_a_limit_that_is_no_number_of_seconds_is_refused(box: Box, wrong: Any) -> None:
    with pytest.raises(Exception, match=r"docs/FORMATS\.md"):
        box.far.start({**box.job("pass"), "idle_s": wrong})
