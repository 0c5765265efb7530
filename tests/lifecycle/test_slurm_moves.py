"""Tests of runs that continue in another job of a scripted Slurm: after which ends, from which step, with which cap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import ticks
from gpurun.core.command import Command
from gpurun.core.errors import ExitCode, UsageError
from gpurun.core.journal_records import Event, RunState
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.core.stop_request import ask_to_stop
from gpurun.core.transfer_progress import read_moving
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import create_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle import job_spec
from gpurun.lifecycle.artifacts import on_demand
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.steps import move_run
from tests.command_line import gpurun
from tests.emulators.slurm import ScriptedSlurm
from tests.emulators.slurm.programs import OWNER
from tests.lifecycle.slurm_run import CLOCK, begin, drive, ended, events_of, failure_of, home, slurm
from tests.plan_makers import make_command_plan
from tests.users_scripts import NANOGPT

__all__ = ["home", "slurm"]


@pytest.fixture(autouse=True)
def profile(slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the login shell read the scripted cluster's profile instead of that of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(slurm.profile.parent))


STEPS = 60
SLOW_NANOGPT = NANOGPT.replace("i % 10", "i % 30").replace("sleep(0.02)", "sleep(0.1)")


def planned(home: Home, tmp_path: Path, steps: int = STEPS, *, max_cost: Any = None, **choices: Any) -> Plan:
    """Return the plan of a script that saves every three seconds, and whose run may continue in another job."""
    lab = tmp_path / "lab"
    lab.mkdir(exist_ok=True)
    (lab / "train.py").write_text(SLOW_NANOGPT)
    command = Command(
        argv=("python", "train.py", f"--max_iters={steps}"), folder=str(lab), outputs=("out-char/ckpt.pt",),
        checkpoints="out-char/ckpt.pt", resume_arg="--init_from=resume", output_bytes=1_000_000,
    )  # fmt: skip
    chosen = Choices(**{"accept_cpu": True, "keep_going": True, "max_gpu_hours": 4.0, **choices})
    request = Request(
        recipe="", providers=("slurm",), gpu=GpuNeed(count=0, name="cpu"), command=command, choices=chosen,
        max_cost_micros=max_cost,
    )  # fmt: skip
    return make_command_plan(request, run="fox-41", home=home, clock=CLOCK, say=print)


def opened(home: Home, tmp_path: Path, steps: int = STEPS, **more: Any) -> RunFolder:
    """Open a run of the plan that `planned` returns, ready to be driven, and return its folder."""
    plan = planned(home, tmp_path, steps, **more)
    return create_run(home, Request(recipe="", providers=("slurm",), choices=plan.choices), plan)


def until(what: str, true: Callable[[], bool]) -> None:
    """Wait at most 60 s until `true()` holds, or else fail with the name `what`."""
    for _ in ticks(CLOCK, 0.02, 60):
        if true():
            return
    pytest.fail(f"it never came to {what}")


def recorded(folder: RunFolder, event: Event, times: int = 1) -> Callable[[], bool]:
    """Return a function that returns whether the journal has an event at least `times` times."""
    return lambda: folder.journal.exists() and events_of(folder).count(event) >= times


def saved(slurm: ScriptedSlurm) -> bool:
    """Return whether a job has a finished checkpoint that can be downloaded."""
    return any("ckpt.pt" in path.read_text() for path in slurm.work.glob("*/out/MANIFEST.json"))


def legs(folder: RunFolder) -> list[dict[str, Any]]:
    records = read_journal(folder.journal).records
    return [dict(record.data) for record in records if record.event is Event.LEG_PLANNED]


def one_at_a_time(slurm: ScriptedSlurm) -> bool:
    """Return whether each job was over before the next one was submitted."""
    ends = [(slurm.state / "jobs" / job / "ended").read_text() for job in slurm.jobs]
    submitted = [(slurm.state / "jobs" / job / "submitted").read_text() for job in slurm.jobs]
    return all(int(end) <= int(next_one) for end, next_one in zip(ends, submitted[1:], strict=False))


def check_moved(home: Home, folder: RunFolder, slurm: ScriptedSlurm, jobs: int = 2) -> None:
    """Assert that the run used this many jobs in turn, its files are at home, and the receipt has a line for each."""
    assert json.loads((folder.artifacts / "outputs/out-char/ckpt.pt").read_text()) == {"iter": STEPS - 1}
    assert len(slurm.jobs) == jobs
    assert one_at_a_time(slurm)
    assert list(slurm.work.iterdir()) == []
    receipt = read_receipt(home, folder).predicate
    assert [leg["leg"] for leg in receipt["legs"]] == list(range(1, jobs + 1))
    assert len([rental for rental in receipt["cost"]["rentals"] if rental["end"] != "refused"]) == jobs
    assert receipt["cost"]["gpu_hours"] <= 4
    assert [row.problems for row in audit(home).rows] == [()]


@pytest.mark.parametrize("books", [True, False], ids=["accounting names root", "no accounting"])
def test_a_job_that_an_admin_cancels_continues_in_another(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, books: bool
) -> None:
    if books:
        slurm.set("books")
    folder = opened(home, tmp_path)
    child = begin(home)
    until("a checkpoint", lambda: saved(slurm))
    slurm.cancel("1")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    (leg,) = legs(folder)
    assert [file["name"] for file in leg["files"]] == ["outputs/out-char/ckpt.pt"]
    assert "CANCELLED" in leg["why"]
    assert 3.9 < leg["left_gpu_hours"] < 4
    assert leg["left_micros"] is None
    check_moved(home, folder, slurm)


@pytest.mark.parametrize("moment", ["submitted", "queued", "booting", "training", "collecting"])
def test_cancelled_at_any_record_it_continues_in_one_other_job(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, moment: str
) -> None:
    """The job is cancelled before it has saved a checkpoint: the run must start again from step 0, in one other job."""
    folder = opened(home, tmp_path)
    if moment == "queued":
        slurm.set("hold", "Priority")
    child = begin(home)
    moments = {
        "submitted": recorded(folder, Event.CREATE_INTENDED),
        "queued": lambda: is_moving(folder, "queued"),
        "booting": lambda: (slurm.state / "jobs" / "1" / "started").exists(),
        "training": recorded(folder, Event.TRAIN_STARTED),
        "collecting": recorded(folder, Event.COLLECT_INTENDED),
    }
    until(moment, lambda: bool(slurm.jobs) and moments[moment]())
    slurm.cancel("1")
    slurm.clear("hold")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    if moment == "collecting":  # All files were saved, and those that are not at home come from the job's folder.
        assert slurm.jobs in (["1"], ["1", "2"])
        assert one_at_a_time(slurm)
    else:
        assert legs(folder)[0]["step"] == 0
        check_moved(home, folder, slurm)
    assert [row.problems for row in audit(home).rows] == [()]


def is_moving(folder: RunFolder, words: str) -> bool:
    """Return whether the progress that the run shows contains these words."""
    shown = read_moving(folder, CLOCK.wall())
    return shown is not None and words in shown.words


@pytest.mark.parametrize("word", ["PREEMPTED", "NODE_FAIL", "TIMEOUT"])
def test_a_job_that_slurm_ends_continues_in_another(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, word: str
) -> None:
    slurm.set("books")
    folder = opened(home, tmp_path)
    child = begin(home)
    until("a checkpoint", lambda: saved(slurm))
    slurm.end_job("1", word)
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    assert word in legs(folder)[0]["why"]
    check_moved(home, folder, slurm)


@pytest.mark.parametrize("moment", ["queued", "a checkpoint"])
def test_a_job_that_its_own_user_cancels_ends_the_run(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, moment: str
) -> None:
    slurm.set("books")
    if moment == "queued":
        slurm.set("hold", "Priority")
    folder = opened(home, tmp_path)
    child = begin(home)
    until(moment, lambda: is_moving(folder, "queued") if moment == "queued" else saved(slurm))
    slurm.cancel("1", OWNER)
    assert ended(child, home) == (ExitCode.NO_OFFER if moment == "queued" else ExitCode.TRAINING_FAILED)
    assert slurm.jobs == ["1"]
    assert legs(folder) == []
    messages = [str(record.data.get("message")) for record in read_journal(folder.journal).records]
    assert any(re.search(r"\bby (the|its own) user\b", message) for message in messages), messages
    if moment != "queued":
        assert (folder.artifacts / "outputs/out-char/ckpt.pt").exists(), "what was finished comes from its folder"
    assert [row.problems for row in audit(home).rows] == [()]


def test_what_gpurun_itself_cancels_counts_as_lost(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    """An admin requeues the job and holds it; gpurun cancels it under the user's name.

    The run must count it as lost.
    """
    slurm.set("books")
    folder = opened(home, tmp_path)
    child = begin(home)
    until("a checkpoint", lambda: saved(slurm))
    slurm.set("hold", "JobHeldAdmin")
    slurm.set("requeue")
    until("its end", recorded(folder, Event.DEATH_PROVEN))
    slurm.clear("hold")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_moved(home, folder, slurm)


def test_a_job_that_never_starts_in_time_is_not_queued_again(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    folder = opened(home, tmp_path)
    slurm.set("hold", "DEADLINE")
    assert drive(home) == ExitCode.NO_OFFER
    assert failure_of(folder)["code"] == "slurm.queue_over"
    assert slurm.jobs == ["1"]


def test_a_cap_below_a_second_start_up_is_warned_of_and_ends_it(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    warned = planned(home, tmp_path, max_gpu_hours=0.2)
    assert not warned.choices.keep_going
    assert any("0.20 GPU-hours does not pay for a second start-up" in words for words in warned.warnings)
    unbound = planned(home, tmp_path, max_gpu_hours=None)
    assert not unbound.choices.keep_going
    assert any("--max-gpu-hours" in words for words in unbound.warnings)


def test_earlier_jobs_reduce_what_the_next_one_may_take(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job used 1.0 of 1.1 GPU-hours. The rest does not pay for a second start, so no job must follow."""
    monkeypatch.setattr(move_run, "gpu_hours_at_most", lambda *_: 1.0)
    folder = opened(home, tmp_path, max_gpu_hours=1.1)
    child = begin(home)
    until("a checkpoint", lambda: saved(slurm))
    slurm.cancel("1")
    until("the wait at no cost", lambda: is_moving(folder, "$0.00 an hour"))
    ask_to_stop(folder, "destroy", by="user", reason="seen")
    ended(child, home)
    assert slurm.jobs == ["1"]


@pytest.mark.parametrize("record", ["death.proven", "leg.planned", "create.intended"])
def test_killed_between_two_jobs_it_is_resumed_with_one_job(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, record: str
) -> None:
    folder = opened(home, tmp_path)
    path = "after train.started > after death.proven" + (f" > after {record}" if record != "death.proven" else "")
    child = begin(home, GPURUN_CRASH_AT=path)
    until("a checkpoint", lambda: saved(slurm))
    slurm.cancel("1")
    assert ended(child, home) == -9
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    check_moved(home, folder, slurm)


def stopping_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first job's time end a few seconds after its command has begun."""
    usual = job_spec.stops_of

    def stops_of(state: RunState, context: Context) -> tuple[float, float]:
        return (4.0, 20.0) if state.leg == 1 else usual(state, context)

    monkeypatch.setattr(job_spec, "stops_of", stops_of)


def test_a_job_at_its_partitions_limit_saves_and_continues(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.set("sinfo", "main*|up|6:00|idle|2|(null)")
    stopping_early(monkeypatch)
    folder = opened(home, tmp_path)
    assert drive(home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    (leg,) = legs(folder)
    assert leg["step"] == leg["reached"], "all that was done was saved, and came home"
    check_moved(home, folder, slurm)


def test_a_job_that_its_cap_ends_does_not_continue(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping_early(monkeypatch)
    folder = opened(home, tmp_path)
    assert drive(home) == ExitCode.BUDGET_STOP, (home.root / "driven.txt").read_text()
    assert (slurm.jobs, legs(folder)) == (["1"], [])


def test_dollars_are_the_cap_where_the_cluster_has_a_price(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    home.config.write_text(home.config.read_text() + "price_per_gpu_hour = 3.6\n")
    folder = opened(home, tmp_path, max_cost=usd(5), max_gpu_hours=None)
    child = begin(home)
    until("a checkpoint", lambda: saved(slurm))
    slurm.cancel("1")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    (leg,) = legs(folder)
    assert 0 < leg["spent_micros"] == usd(5) - leg["left_micros"]
    assert "left_gpu_hours" not in leg
    check_moved(home, folder, slurm)
    assert read_receipt(home, folder).predicate["cost"]["cap_kept"] is True


def test_an_unreadable_folder_ends_the_run_and_is_kept(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the unreadable folder has the newest checkpoint.

    Another job would lose steps, and a clean-up would delete it.
    """
    monkeypatch.setattr(on_demand, "PATIENCE_S", 0.5)
    folder = opened(home, tmp_path)
    assert drive(home, GPURUN_CRASH_AT="after train.started") == -9
    until("a checkpoint", lambda: saved(slurm))
    slurm.cancel("1")
    until("its end", lambda: (slurm.state / "jobs" / "1" / "ended").exists())
    home.config.write_text(home.config.read_text().replace("tiny-python", "no-python"))
    assert drive(home) == ExitCode.TRAINING_FAILED
    assert (slurm.jobs, legs(folder)) == (["1"], [])
    (left,) = slurm.work.iterdir()
    assert "ckpt.pt" in (left / "out/MANIFEST.json").read_text()


def two_clusters(home: Home, slurm: ScriptedSlurm, *, price: str = "") -> None:
    """Configure two clusters, each with its own partition and workdir; `price` is a config line for the second one."""
    first = home.config.read_text()
    second = first.replace("[slurm.lab]", "[slurm.annex]").replace(str(slurm.work), f"{slurm.work}-annex")
    home.config.write_text(f'{first}partition = "debug"\n{second}partition = "main"\n{price}')


def sinfo(slurm: ScriptedSlurm, debug: str) -> None:
    slurm.set("sinfo", f"debug|{debug}|2-00:00:00|idle|1|(null)\nmain*|up|2-00:00:00|idle|1|(null)")


def test_the_next_job_is_on_the_cluster_that_takes_it(home: Home, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    two_clusters(home, slurm)
    sinfo(slurm, "up")
    folder = opened(home, tmp_path, clusters=("lab", "annex"))
    child = begin(home)
    until("a checkpoint", lambda: saved(slurm))
    sinfo(slurm, "down")
    slurm.cancel("1")
    assert ended(child, home) == ExitCode.DONE, (home.root / "driven.txt").read_text()
    intents = [record.data for record in read_journal(folder.journal).records if record.event is Event.CREATE_INTENDED]
    assert [intent["offer"]["region"] for intent in intents] == ["lab", "annex"]
    assert legs(folder)[0]["region"] == "lab"
    assert list(Path(f"{slurm.work}-annex").iterdir()) == []
    check_moved(home, folder, slurm)


def test_a_named_cluster_that_cannot_take_the_run_is_left_out(home: Home, slurm: ScriptedSlurm) -> None:
    two_clusters(home, slurm)
    sinfo(slurm, "down")
    named = ("--provider", "slurm:lab", "--provider", "slurm:annex", "--max-gpu-hours", "4")
    shown = gpurun("plan", "mini-gpt", *named, "--gpu", "cpu", "--json", "--home", str(home.root))
    plan = json.loads(shown.stdout)["data"]
    assert plan["offer"]["region"] == "annex"
    assert any(words.startswith("Left out: lab") for words in plan["warnings"]), plan["warnings"]


def test_clusters_with_caps_in_dollars_and_in_hours_do_not_mix(
    home: Home, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    two_clusters(home, slurm, price="price_per_gpu_hour = 1.25\n")
    with pytest.raises(UsageError) as refused:
        planned(home, tmp_path, clusters=("lab", "annex"), max_cost=usd(5))
    assert refused.value.code == "slurm.mixed_caps"
