"""Tests that a box which is not destroyed is left as it was, without processes or files of the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Box, kill

from gpurun.remote.interface import FarRefusal

STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w').write('1')\ntime.sleep(60)"


def test_nothing_of_the_run_is_left(box: Box) -> None:
    box.far.start(box.job(STUBBORN))
    box.until(lambda: box.text("up"))
    assert box.far.farewell() >= 1
    assert box.living() == []
    assert not box.folder.exists()


def test_a_farewell_keeps_the_trainers_output_alone_if_asked(box: Box) -> None:
    box.far.start(box.job(STUBBORN))
    box.until(lambda: box.text("up"))
    (box.folder / "out" / "checkpoints").mkdir()
    (box.folder / "out" / "checkpoints" / "000001.model.safetensors").write_bytes(b"weights")
    for ended in (2, 0):
        assert box.far.farewell(keep_results=True) <= ended
        assert box.living() == []
        assert [path.name for path in box.folder.iterdir()] == ["out"]
        assert (box.folder / "out" / "checkpoints" / "000001.model.safetensors").read_bytes() == b"weights"
    box.far.farewell()
    assert not box.folder.exists()


def test_a_child_that_left_session_and_mark_behind_is_ended_too(box: Box) -> None:
    hidden = "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True, cwd=os.getcwd())\n"
    box.far.start(box.job(hidden + STUBBORN))
    box.until(lambda: box.text("up"))
    box.far.farewell()
    assert box.living() == []


def test_a_trainer_whose_keeper_was_killed_is_ended_too(box: Box) -> None:
    box.far.start(box.job(STUBBORN))
    box.until(lambda: box.text("up"))
    kill(box.agent_file("keeper.json")["keeper_pid"])
    box.far.farewell()
    assert box.living() == []
    assert not box.folder.exists()


def test_a_keeper_that_does_not_end_is_ended(box: Box) -> None:
    box.alter_agent("WAIT_S = 20", "WAIT_S = 0.5")
    box.far.start(box.job(STUBBORN))
    keeper = box.agent_file("keeper.json")["keeper_pid"]
    os.kill(keeper, 19)  # SIGSTOP: as if its disk never answered
    reply = box.machine.call(box.agent_argv("farewell"), timeout_s=20)
    assert json.loads(reply.stdout) == {"killed": 1}
    assert box.living() == []


def test_a_farewell_may_come_twice_and_before_any_start(box: Box) -> None:
    assert box.far.farewell() == 0
    box.folder.mkdir()  # A machine over SSH makes this folder with every call.
    assert box.far.farewell() == 0
    assert not box.folder.exists()


def test_a_farewell_with_the_agent_there_uploads_nothing(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise FarRefusal("disk_full", "there is no room")

    monkeypatch.setattr(box.machine, "put", full)
    assert box.far.farewell() == 0
    assert not box.folder.exists()


def test_what_was_cut_off_half_way_is_finished_by_the_next(box: Box) -> None:
    box.far.start(box.job(STUBBORN))
    box.until(lambda: box.text("up"))
    for name in ("agent.pyz", "job.json"):
        (box.folder / name).unlink()
    shutil.rmtree(box.folder / "bundle")
    box.far.farewell()
    assert box.living() == []
    assert not box.folder.exists()


@pytest.mark.parametrize("place", ["home", "above", "elsewhere"])
def test_a_folder_that_is_not_a_runs_own_is_never_removed(box: Box, tmp_path: Path, place: str) -> None:
    victim = tmp_path / "people"
    home = victim / "me" if place == "above" else victim
    home.mkdir(parents=True)
    (victim / "thesis.tex").write_text("ten years")
    zipped = victim / "agent.pyz" if place != "elsewhere" else box.folder / "agent.pyz"
    if place != "elsewhere":
        shutil.copy(box.folder / "agent.pyz", zipped)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(zipped), "farewell", "--root", str(victim)],
        env={**os.environ, "HOME": str(home if place != "elsewhere" else tmp_path / "nobody")},
        capture_output=True, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["error"]["code"] == "not_a_run"
    assert (victim / "thesis.tex").read_text() == "ten years"


def test_other_runs_on_the_same_machine_go_on(box: Box, tmp_path: Path) -> None:
    other = Box(tmp_path / "other")
    try:
        for one in (box, other):
            one.far.start(one.job(STUBBORN))
            one.until(lambda one=one: one.text("up"))
        box.far.farewell()
        assert other.status().state == "running"
    finally:
        other.close()


def test_what_cannot_be_removed_is_told(box: Box) -> None:
    box.alter_agent("shutil.rmtree(root, ignore_errors=True)", "None")
    reply = box.machine.call(box.agent_argv("farewell"), timeout_s=20)
    assert json.loads(reply.stdout)["error"]["code"] == "not_gone"
    assert FarRefusal("not_gone", "x").code == "far.not_gone"
