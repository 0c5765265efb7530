"""Tests of a sweep as several jobs of a scripted Slurm: one sbatch, one cap, one receipt, and each trial once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import ticks
from gpurun.core.command import Command
from gpurun.core.errors import ExitCode, UsageError
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices, Request
from gpurun.core.stop_request import ask_to_stop
from gpurun.core.sweep import make_sweep
from gpurun.jobs import sweep
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import create_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.planning.place import Desk
from gpurun.planning.planner import make_plan
from gpurun.planning.sweep_proposal import sweep_proposal
from tests.emulators.slurm import ScriptedSlurm
from tests.lifecycle.slurm_run import CLOCK, KILLS, begin, drive, ended, home, slurm

__all__ = ["home", "slurm"]

TRAIN = """\
echo "${SLURM_JOB_ID:-1}" >job.txt
trap 'echo saved >saved.txt; exit 0' TERM
for step in 1 2 3 4 5; do
    echo "step $step/5 loss $1.$step"
    sleep "$2"
done
echo "$1" >weights.txt
"""


@pytest.fixture(autouse=True)
def _looks_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the search for files outside a command's folder, because no test here needs it."""
    monkeypatch.setattr(sweep, "LOOK_S", 0.2)


TWELVE = tuple(str(number) for number in range(12, 0, -1))


def opened(
    home: Home,
    tmp_path: Path,
    *,
    values: tuple[str, ...] = TWELVE,
    pause: str = "0.05",
    keep: int = 12,
    script: str = TRAIN,
    **more: Any,
) -> RunFolder:
    """Open the run of a sweep over two jobs, and return its folder."""
    (lab := tmp_path / "lab").mkdir()
    (lab / "train.sh").write_text(script)
    command = Command(argv=("sh", "train.sh", "{lr}", pause), folder=str(lab), outputs=("*.txt",), grace_s=30, **more)
    request = Request(
        recipe="",
        providers=("slurm",),
        gpu=GpuNeed(count=0, name="cpu", nodes=2),
        command=command,
        choices=Choices(accept_cpu=True, max_gpu_hours=2),
        sweep=make_sweep({"lr": values}, {"keep": keep}),
        max_cost_micros=usd(9),
    )
    return create_run(home, request, make_plan(proposal(home, request)))


def proposal(home: Home, request: Request) -> Any:
    return sweep_proposal(request, Desk("fox-41", home, CLOCK, print), is_asked=False, admit=lambda _: None)


def trials(folder: RunFolder) -> list[dict[str, Any]]:
    lines = folder.events.read_text().splitlines() if folder.events.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "trial"]


def until(folder: RunFolder, trial: int, state: str) -> None:
    for _ in ticks(CLOCK, 0.05, 60):
        if any((event["trial"], event["state"]) == (trial, state) for event in trials(folder)):
            return
    raise AssertionError(f"trial {trial} was never {state}")


def jobs_used(folder: RunFolder) -> list[str]:
    """Return, for each trial whose files were downloaded, the job in which the trial ran."""
    best = folder.artifacts / "outputs" / "gpurun-sweep" / "best"
    return sorted(path.read_text().strip() for path in best.glob("*/job.txt"))


def check_promises(home: Home, folder: RunFolder, slurm: ScriptedSlurm, count: int = 12) -> dict[str, Any]:
    """Assert that both jobs of one sbatch are over, their folder is gone, and each trial has one row in the receipt."""
    assert slurm.jobs == ["1", "2"]
    assert all((slurm.state / "jobs" / job / "ended").exists() for job in slurm.jobs)
    assert "--array=0-1" in slurm.options_of("1")
    assert list(slurm.work.iterdir()) == []
    events = [record.event for record in read_journal(folder.journal).records]
    assert events.count(Event.DEATH_PROVEN) == 1
    receipt: dict[str, Any] = read_receipt(home, folder).predicate
    rows = receipt["training"]["trials"]["rows"]
    assert [row["trial"] for row in rows] == list(range(1, count + 1))
    assert len({row["params"]["lr"] for row in rows}) == count
    assert receipt["cost"]["cap_kept"]
    assert [row.problems for row in audit(home).rows] == [()]
    return receipt


def test_twelve_trials_are_two_jobs_under_one_cap(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    home.config.write_text(home.config.read_text() + "price_per_gpu_hour = 1.5\n")
    folder = opened(home, tmp_path)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    receipt = check_promises(home, folder, slurm)
    assert {row["state"] for row in receipt["training"]["trials"]["rows"]} == {"done"}
    used = jobs_used(folder)
    assert len(used) == 12
    assert min(used.count("1"), used.count("2")) >= 3
    assert [(slurm.state / "jobs" / job / "word").read_text() for job in ("1", "2")] == ["COMPLETED"] * 2
    assert (receipt["instance"]["id"], receipt["instance"]["jobs"]) == ("lab/1_0", 2)
    (rental,) = receipt["cost"]["rentals"]
    assert rental["rate_micros_per_hour"] == usd(3)
    assert receipt["cost"]["gpu_hours"] == pytest.approx(2 * rental["billable_s"] / 3600, abs=1e-4)


OFTEN = ("create.observed", "train.started")


@pytest.mark.parametrize(
    "record", [pytest.param(record, marks=[] if record in OFTEN else [pytest.mark.slow]) for record in KILLS]
)
def test_killed_at_a_record_and_resumed_no_trial_runs_twice(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, record: str
) -> None:
    folder = opened(home, tmp_path, values=TWELVE[:4])
    assert drive(home, GPURUN_CRASH_AT=f"after {record}") == -9
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_promises(home, folder, slurm, 4)
    begun = [event["trial"] for event in trials(folder) if event["state"] == "running" and event["step"] is None]
    assert sorted(begun) == [1, 2, 3, 4]


def test_killed_during_a_trial_and_resumed_no_trial_runs_twice(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    folder = opened(home, tmp_path, pause="0.1")
    child = begin(home)
    until(folder, 5, "running")
    child.kill()
    child.join()
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_promises(home, folder, slurm)
    begun = [event["trial"] for event in trials(folder) if event["state"] == "running" and event["step"] is None]
    assert sorted(begun) == list(range(1, 13))
    assert set(jobs_used(folder)) == {"1", "2"}


def test_a_stop_reaches_the_trial_in_the_other_job(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    folder = opened(home, tmp_path, values=("1", "2"), pause="4")
    child = begin(home)
    until(folder, 2, "running")
    CLOCK.sleep(1.0)
    ask_to_stop(folder, "save", by="user", reason="enough")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    receipt = check_promises(home, folder, slurm, 2)
    assert [row["state"] for row in receipt["training"]["trials"]["rows"]] == ["stopped"] * 2
    best = folder.artifacts / "outputs" / "gpurun-sweep" / "best"
    assert sorted(path.parent.name for path in best.glob("*/saved.txt")) == ["001", "002"]
    assert jobs_used(folder) == ["1", "2"]


def test_a_trial_whose_job_ends_is_begun_again_in_another(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    folder = opened(home, tmp_path, values=TWELVE[:4], pause="0.4")
    child = begin(home)
    until(folder, 2, "running")
    slurm.end_job("2", "NODE_FAIL")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    receipt = check_promises(home, folder, slurm, 4)
    assert {row["state"] for row in receipt["training"]["trials"]["rows"]} == {"done"}
    assert "stopped" in [event["state"] for event in trials(folder)]
    assert "1" in jobs_used(folder)


def test_where_the_job_that_leads_ends_the_others_are_ended_too(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    folder = opened(home, tmp_path, pause="1")
    child = begin(home)
    until(folder, 2, "running")
    slurm.end_job("1", "NODE_FAIL")
    assert ended(child, home) == ExitCode.TRAINING_FAILED, (home.root / "driven.txt").read_text()
    assert (slurm.state / "jobs" / "2" / "word").read_text() == "CANCELLED"
    assert [row.problems for row in audit(home).rows] == [()]


def test_with_the_laptop_lost_the_other_jobs_end_with_the_first(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    folder = opened(home, tmp_path, values=TWELVE[:4], pause="0.1")
    child = begin(home)
    until(folder, 3, "running")
    child.kill()
    child.join()
    for _ in ticks(CLOCK, 0.1, 60):
        if (slurm.state / "jobs" / "2" / "ended").exists():
            break
    assert (slurm.state / "jobs" / "2" / "word").read_text() == "COMPLETED"
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_promises(home, folder, slurm, 4)


def test_secrets_and_variables_reach_jobs_and_no_shared_disk(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-77")
    slurm.profile.write_text(slurm.profile.read_text() + "export RATE=login\n")
    leak = 'grep -rl "$MY_TOKEN" "$PWD/../../../.." >found.txt; echo "$MY_TOKEN $RATE" | rev >token.txt\n'
    more: dict[str, Any] = {"secrets": ("MY_TOKEN",), "env": {"RATE": "own"}}
    folder = opened(home, tmp_path, values=("1", "2"), pause="0.6", script=leak + TRAIN, **more)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    best = folder.artifacts / "outputs" / "gpurun-sweep" / "best"
    assert jobs_used(folder) == ["1", "2"]
    assert [(best / name / "token.txt").read_text() for name in ("001", "002")] == ["nwo 77-yranac\n"] * 2
    assert [(best / name / "found.txt").read_text() for name in ("001", "002")] == ["", ""]


def test_jobs_of_an_image_are_refused_before_any_request(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    command = Command(argv=("sh", "-c", "{lr}"), folder=str(tmp_path), outputs=("*.txt",))
    request = Request(
        recipe="",
        providers=("slurm",),
        gpu=GpuNeed(count=0, name="cpu", nodes=2),
        command=command,
        choices=Choices(accept_cpu=True, image="/scratch/torch.sif"),
        sweep=make_sweep({"lr": ("1", "2")}, {}),
    )
    with pytest.raises(UsageError) as refused:
        make_plan(proposal(home, request))
    assert refused.value.code == "sweep.image"
    assert slurm.jobs == []
