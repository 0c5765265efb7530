"""Tests of the program that runs a sweep's trials on the machine: no trial runs twice, even after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.run_plan import Choices
from gpurun.jobs.requirements import with_pip_if_it_can
from tests.refusals import lacking

PACKAGE = Path(__file__).parents[2] / "gpurun"
TRAIN = """\
import argparse, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--width", type=int, default=1)
parser.add_argument("--steps", type=int, default=9)
parser.add_argument("--pause", type=float, default=0.0)
given = parser.parse_args()
open("started.txt", "w").write(os.environ["GPURUN_TRIAL"])
for step in range(1, given.steps + 1):
    loss = float("nan") if given.lr == 7.0 else given.lr * given.width + 1 / step
    print(f"step {step}/{given.steps} | loss {loss}", flush=True)
    time.sleep(given.pause)
if given.lr == 13.0:
    raise RuntimeError("the disk is full")
open("weights.bin", "w").write(str(given.lr))
"""
WORDS = ["{python}", "train.py", "--lr", "{lr}", "--width", "{width}"]


class Machine:
    """The folder of a run as it is on its machine, in which sweeps run one after the other."""

    def __init__(self, root: Path) -> None:
        self.bundle, self.out = root / "bundle", root / "out"
        self.work = self.bundle / "work"
        for folder in (self.work, self.out):
            folder.mkdir(parents=True)
        (self.work / "train.py").write_text(TRAIN)

    def begins(self, **order: Any) -> subprocess.Popen[str]:
        usual = {
            "space": {"lr": ["3", "1", "2"], "width": ["1"]}, "trials": 3, "sampler": "grid", "prune": "", "keep": 1,
            "seed": 0, "at_once": 1, "cards": 0, "is_recipe": False, "argv": WORDS, "outputs": ["**"], "total_steps": 0,
            "secrets": [], "stop_signal": "TERM", "grace_s": 1, "earlier": ["../earlier_sweep"], "jobs": 1, "env": [],
        }  # fmt: skip
        (self.bundle / "sweep.json").write_text(json.dumps(usual | order))
        start = "from gpurun.remote.agent.runner.sweep import main; raise SystemExit(main())"
        env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "GPURUN_EVENTS": str(self.bundle / "reported.jsonl")}
        return subprocess.Popen(
            [sys.executable, "-c", start, "../sweep.json"], cwd=self.work, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def sweeps(self, **order: Any) -> tuple[int, str]:
        child = self.begins(**order)
        said, _ = child.communicate(timeout=60)
        return child.returncode, said

    @property
    def table(self) -> Any:
        return json.loads((self.work / "gpurun-sweep" / "trials.json").read_text())

    @property
    def states(self) -> list[str]:
        return [row["state"] for row in self.table["rows"]]

    @property
    def kept(self) -> list[str]:
        best = self.work / "gpurun-sweep" / "best"
        return sorted(path.relative_to(best).as_posix() for path in best.rglob("*") if path.is_file())

    def events(self) -> list[Any]:
        events = self.out / "events.jsonl"
        return [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_combination_is_tried_once_and_the_best_kept(machine: Machine) -> None:
    code, said = machine.sweeps(space={"lr": ["3", "1", "2"], "width": ["1", "2"]}, trials=6, at_once=2)
    assert code == 0, said
    rows = machine.table["rows"]
    assert [(row["params"]["lr"], row["params"]["width"]) for row in rows] == [
        ("3", "1"), ("3", "2"), ("1", "1"), ("1", "2"), ("2", "1"), ("2", "2"),
    ]  # fmt: skip
    assert machine.table["best"] == [3]
    assert rows[2]["result"] == 1 + 1 / 9
    assert machine.kept == ["003/started.txt", "003/weights.bin"]
    assert "best: trial 003" in said
    assert "003 | step 9/9" in said
    assert not (machine.bundle / "trials" / "003").exists()
    assert [event["state"] for event in machine.events() if event["trial"] == 3][-1] == "done"


def test_the_best_k_are_kept(machine: Machine) -> None:
    machine.sweeps(keep=2)
    assert machine.table["best"] == [2, 3]
    assert machine.kept == ["002/started.txt", "002/weights.bin", "003/started.txt", "003/weights.bin"]


def test_a_loss_that_is_no_number_is_a_result_that_loses(machine: Machine) -> None:
    code, _ = machine.sweeps(space={"lr": ["7", "1"], "width": ["1"]}, trials=2)
    assert (code, machine.states, machine.table["best"]) == (0, ["nan", "done"], [2])
    code, said = machine.sweeps(space={"lr": ["7"], "width": ["1", "2"]}, trials=2)
    assert code == 0  # The rows of the earlier sweep on this machine count.
    assert "002 | step" not in said


def test_a_failed_trial_is_a_row_and_three_end_the_sweep(machine: Machine) -> None:
    code, _ = machine.sweeps(space={"lr": ["13", "1", "2"], "width": ["1"]})
    assert (code, machine.states, machine.table["best"]) == (0, ["failed", "done", "done"], [2])
    assert machine.table["rows"][0]["why"] == "exit code 1; RuntimeError: the disk is full"


def test_the_last_words_of_a_trial_have_no_secret(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-77")
    words = ["{python}", "-c", "import os; raise SystemExit('refused: ' + os.environ['MY_TOKEN'] + '{lr}{width}')"]
    machine.sweeps(argv=words, secrets=["MY_TOKEN"])
    assert "refused: [secret]" in machine.table["rows"][0]["why"]
    assert "canary" not in (machine.out / "events.jsonl").read_text()


def test_a_sweep_whose_first_three_trials_fail_says_why(machine: Machine) -> None:
    code, said = machine.sweeps(space={"lr": ["13"], "width": ["1", "2", "3", "4", "5"]}, trials=5)
    assert (code, machine.states) == (1, ["failed"] * 3)
    last = said.splitlines()[-1]
    assert last.startswith("error: 3 of 3 trials")
    assert last.endswith("RuntimeError: the disk is full")


def test_a_trial_that_tells_no_loss_has_failed(machine: Machine) -> None:
    code, said = machine.sweeps(argv=["{python}", "-c", "print('{lr} {width}')"], trials=3)
    assert (code, machine.states) == (1, ["failed"] * 3)
    assert "no loss" in said


def test_a_trial_that_falls_behind_ends_at_once(machine: Machine) -> None:
    words = [*WORDS, "--steps", "27", "--pause", "0.05"]
    began = time.monotonic()
    code, said = machine.sweeps(space={"lr": ["1", "2", "3"], "width": ["1"]}, prune="asha", argv=words)
    assert (code, machine.states) == (0, ["done", "pruned", "pruned"]), said
    assert all(row["step"] <= 3 for row in machine.table["rows"][1:])
    assert time.monotonic() - began < 27 * 0.05 + 6
    assert machine.kept == ["001/started.txt", "001/weights.bin"]


def test_a_stop_prefers_a_finished_trial_to_a_better_one(machine: Machine) -> None:
    """A stop once deleted a finished trial's weights for a trial with a lower loss but without weights."""
    child = machine.begins(argv=[*WORDS, "--steps", "40", "--pause", "0.05"])
    until(lambda: any(event["trial"] == 2 and (event["loss"] or 9) < 2 for event in machine.events()))
    child.send_signal(signal.SIGTERM)
    said, _ = child.communicate(timeout=30)
    assert child.returncode == 0, said
    assert machine.states == ["done", "stopped"]
    assert machine.table["rows"][1]["result"] < machine.table["rows"][0]["result"]
    assert machine.table["best"] == [1]
    assert machine.kept == ["001/started.txt", "001/weights.bin"]


@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_a_sweep_that_was_killed_goes_on_with_no_trial_twice(machine: Machine, sampler: str) -> None:
    order = {"space": {"lr": ["1", "2", "3", "4"], "width": ["1"]}, "trials": 4, "sampler": sampler}
    child = machine.begins(**order, argv=[*WORDS, "--pause", "0.03"])
    until(lambda: (machine.work / "gpurun-sweep" / "trials.json").exists() and "done" in machine.states)
    child.kill()
    child.communicate(timeout=30)
    over = [row for row in machine.table["rows"] if row["state"] == "done"]
    code, said = machine.sweeps(**order)
    assert (code, machine.states) == (0, ["done"] * 4), said
    rows = machine.table["rows"]
    assert len({row["params"]["lr"] for row in rows}) == 4
    assert [row for row in rows if row["trial"] in {one["trial"] for one in over}] == over
    assert machine.table["best"] == [next(row["trial"] for row in rows if row["params"]["lr"] == "1")]


def test_another_machine_goes_on_from_what_came_home(machine: Machine, tmp_path: Path) -> None:
    order = {"space": {"lr": ["1", "2", "3"], "width": ["1"]}, "trials": 3}
    machine.sweeps(**order)
    other = Machine(tmp_path / "other")
    table = machine.table
    table["rows"][2]["state"] = "stopped"
    (machine.work / "gpurun-sweep" / "trials.json").write_text(json.dumps(table))
    os.rename(machine.work / "gpurun-sweep", other.bundle / "earlier_sweep")
    code, said = other.sweeps(**order)
    assert (code, other.states) == (0, ["done"] * 3)
    assert "001 |" not in said
    assert other.kept == ["001/started.txt", "001/weights.bin"]
    assert [event["is_restored"] for event in other.events() if event["trial"] == 1] == [True]


def test_a_sampler_that_repeats_itself_tries_nothing_twice(machine: Machine) -> None:
    code, said = machine.sweeps(space={"lr": ["1", "2"], "width": ["1"]}, trials=5, sampler="random")
    assert (code, machine.states) == (0, ["done", "done"])
    assert "settings" in said


def test_a_range_is_drawn_within_its_bounds_and_the_same_again(machine: Machine, tmp_path: Path) -> None:
    space = {"lr": {"low": 1e-4, "high": 1e-2, "log": True, "whole": False},
             "width": {"low": 2, "high": 9, "log": False, "whole": True}}  # fmt: skip
    machine.sweeps(space=space, trials=5, sampler="random", seed=3, at_once=3)
    other = Machine(tmp_path / "other")
    other.sweeps(space=space, trials=5, sampler="random", seed=3)
    drawn = [row["params"] for row in machine.table["rows"]]
    assert drawn == [row["params"] for row in other.table["rows"]]
    assert all(1e-4 <= float(one["lr"]) <= 1e-2 and 2 <= int(one["width"]) <= 9 for one in drawn)
    assert len({one["lr"] for one in drawn}) == 5


def test_optunas_sampler_learns_from_all_earlier_results(machine: Machine) -> None:
    space = {"lr": {"low": 0.0, "high": 1.0, "log": False, "whole": False}, "width": ["1", "2"]}
    words = [*WORDS, "--steps", "1"]
    code, said = machine.sweeps(space=space, trials=12, sampler="tpe", at_once=2, argv=words)
    assert code == 0, said
    code, said = machine.sweeps(space=space, trials=30, sampler="tpe", at_once=2, argv=words)
    assert (code, machine.states) == (0, ["done"] * 30), said
    results = [row["result"] for row in machine.table["rows"]]
    assert sum(results[15:]) < sum(results[:15])


def test_each_trial_that_runs_has_a_card_of_its_own(machine: Machine) -> None:
    words = ["{python}", "-c", "import os, time; time.sleep(0.3); print('step 1 loss {lr}{width}'); "
             "print('card', os.environ['CUDA_VISIBLE_DEVICES'])"]  # fmt: skip
    code, said = machine.sweeps(argv=words, cards=3, at_once=3)
    assert code == 0
    assert {line[-1] for line in said.splitlines() if "card" in line} == {"0", "1", "2"}


def test_a_machine_without_optuna_draws_by_chance_and_says_so(machine: Machine) -> None:
    (broken := machine.work / "optuna").mkdir()
    (broken / "__init__.py").write_text("raise AttributeError('made for another numpy')\n")
    space = {"lr": {"low": 0.0, "high": 1.0, "log": False, "whole": False}, "width": ["1", "2"]}
    code, said = machine.sweeps(space=space, trials=4, sampler="tpe", seed=3)
    assert (code, machine.states) == (0, ["done"] * 4), said
    assert lacking(said, "made for another numpy", "--sampler random") == []
    (warning,) = [event for event in machine.events() if event["kind"] == "warning"]
    assert warning["code"] == "optuna.missing"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 16 MB; skip the test without the right to mount one."""
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


FILLS = """\
import os, sys
rate = float(sys.argv[1])
print(f"step 1/1 loss {rate}", flush=True)
open("weights.bin", "wb").write(os.urandom(1 << 20))
if rate == 1.0:
    with open("huge.bin", "wb") as file:
        while True:
            file.write(os.urandom(1 << 16))
"""


def test_a_trial_that_fills_the_disk_keeps_the_best(small_disk: Path) -> None:
    machine = Machine(small_disk)
    (machine.work / "train.py").write_text(FILLS)
    words = ["{python}", "train.py", "{lr}"]
    code, said = machine.sweeps(space={"lr": ["2", "1", "3"]}, argv=words, keep=2)
    assert (code, machine.states, machine.table["best"]) == (0, ["done", "failed", "done"], [1, 3]), said
    assert "No space left" in machine.table["rows"][1]["why"]
    assert machine.kept == ["001/weights.bin", "003/weights.bin"]


def test_a_full_disk_ends_the_sweep_and_keeps_the_best(small_disk: Path) -> None:
    machine = Machine(small_disk)
    (machine.work / "train.py").write_text(FILLS)
    child = machine.begins(
        space={"lr": ["2", "3", "4", "5"]}, trials=4, keep=1,
        argv=["sh", "-c", "python3 train.py {lr} && sleep 0.$((3 * ({lr} - 2)))"],
    )  # fmt: skip
    until(lambda: (machine.work / "gpurun-sweep" / "trials.json").exists() and "done" in machine.states)
    for size in (1 << 16, 1):  # The last byte is used too.
        with suppress(OSError), (small_disk / "huge").open("ab", buffering=0) as file:
            while file.write(os.urandom(size)):
                continue
    said, _ = child.communicate(timeout=60)
    rows = machine.table["rows"]
    assert rows[0]["state"] == "done"
    assert machine.table["best"] == [1]
    assert machine.kept == ["001/weights.bin"]
    assert {row["state"] for row in rows[1:]} <= {"failed", "stopped"}
    assert child.returncode in (0, 1), said
    assert not [line for line in said.splitlines() if line.startswith("Traceback")]


@pytest.mark.parametrize("pip", ["exit 1", "exit 0"])
def test_a_failing_install_of_optuna_does_not_end_the_set_up(tmp_path: Path, pip: str) -> None:
    script = with_pip_if_it_can(Choices(setup="echo first\n"), ("optuna>=4,<6",), str(tmp_path / "python")).setup
    (tmp_path / "python").write_text(f'#!/bin/sh\n[ "$3" != install ] || {pip}\n')
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(["sh", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "first\n"), done.stderr
    assert ("optuna" in done.stderr) is (pip == "exit 1")
