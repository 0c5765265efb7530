"""Tests of a job that writes nothing: it is recorded, shown by `ps` and a notice, and ended by --idle and --silent."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.session import Session
from gpurun.cli.viewer import show_finished
from gpurun.core.clock import SystemClock
from gpurun.core.command import Command
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Request
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import create_run, look_at_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.notices import Noticed
from gpurun.readers.run_status import run_row
from gpurun.remote.client import Poll
from gpurun.remote.messages import GpuNow
from tests.lifecycle.faults import kept
from tests.lifecycle.scripted_cloud import World
from tests.lifecycle.tiny_runs import drive
from tests.plan_makers import make_command_plan
from tests.refusals import lacking

HANGS = """
import signal, sys, time
def save(*_):
    open("late.txt", "w").write("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("step 1 loss 2.0")
open("early.txt", "w").write("step 1")
time.sleep(600)
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def silent_between(world: World, spans: list[tuple[float, float]], percent: int) -> None:
    """Make the agent report a silent job in these spans of seconds after its start, with the GPU at this use."""
    poll, started_wall = world.far.poll, list[float]()

    def reported(wants: Any) -> Poll:
        answer = poll(wants)
        started_wall.append(world.clock.wall())
        age_s = world.clock.wall() - started_wall[0]
        since = next((start for start, end in spans if start <= age_s < end), None)
        card = GpuNow(use_percent=percent, memory_mib=1, memory_of_mib=2, celsius=None, watts=None)
        more = {"silent_since_wall": None if since is None else started_wall[0] + since, "gpus": (card,)}
        return Poll(answer.status.model_copy(update=more), answer.chunks)

    world.far.poll = reported  # type: ignore[method-assign]


def incidents(world: World) -> list[dict[str, Any]]:
    return [dict(data) for data in world.all_of(Event.INCIDENT) if str(data["code"]).startswith("job.")]


def test_a_silence_is_recorded_once_with_cards_and_its_limit(world: World) -> None:
    silent_between(world, [(2, 6)], percent=100)
    assert world.drive() is ExitCode.DONE
    silence, over = incidents(world)
    assert (silence["code"], over["code"]) == ("job.silent", "job.heard")
    assert "100 %" in silence["message"]
    assert lacking(silence["message"], "1 h 00 m", "--idle") == []
    assert kept(world)


def test_a_sparse_writer_is_silent_only_after_twice_its_pause(world: World) -> None:
    silent_between(world, [(2, 6), (8, 14), (16, 50)], percent=0)
    assert world.drive() is ExitCode.DONE
    assert [incident["code"] for incident in incidents(world)] == ["job.silent", "job.heard"] * 2


def test_ps_and_a_notice_tell_of_it_while_it_lasts(world: World) -> None:
    silent_between(world, [(2, 1e9)], percent=100)
    seen: list[tuple[str, float | None]] = []
    during = world.far.during

    def look_on() -> None:
        during()
        if incidents(world) and not seen:
            sight = look_at_run(world.home, "fox-41")
            seen.append((run_row(sight, world.clock.wall() + 600).state, sight.state.silent_since_wall))

    world.far.during = look_on  # type: ignore[method-assign]
    world.drive()
    ((state, since_wall),) = seen
    assert ", silent 10 m" in state
    assert since_wall is not None
    news = Noticed(world.folder, 0).news(read_journal(world.folder.journal).records, world.clock.wall())
    assert [notice for notice, _, _ in news] == ["started", "silent", "trained", "finished"]


@pytest.mark.parametrize(("reason", "flag"), [("idle", "--idle"), ("silent", "--silent")])
def test_a_job_its_agent_stopped_for_silence_has_failed(world: World, reason: str, flag: str) -> None:
    world.far.stopped = reason
    assert world.drive() is ExitCode.TRAINING_FAILED
    observed = world.all_of(Event.TRAIN_OBSERVED)[-1]
    assert (observed["outcome"], observed["reason"], flag in observed["message"]) == ("failed", reason, True)
    assert world.all_of(Event.COLLECT_OBSERVED), "what it saved comes home"
    assert kept(world)


def command_run(home: Home, lab: Path, script: str, **choices: Any) -> Any:
    """Run a script here with these choices; return how its supervisor ended, and the run afterwards."""
    lab.mkdir(exist_ok=True)
    (lab / "train.py").write_text(script)
    home.prepare()
    command = Command(argv=("train.py",), folder=str(lab / "train.py"), outputs=("**",))
    request = Request(recipe="", providers=("local",), command=command, choices=Choices(**choices))
    plan = make_command_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print)
    create_run(home, request, plan)
    driven = drive(home)
    return driven, look_at_run(home, "fox-41")


def test_a_command_that_hangs_here_is_stopped_and_comes_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    driven, sight = command_run(home, tmp_path / "lab", HANGS, idle_s=4)
    assert driven.returncode == ExitCode.TRAINING_FAILED, driven.stderr
    predicate = read_receipt(home, sight.folder).predicate
    assert (predicate["training"]["reason"], predicate["training"]["exit_code"]) == ("idle", 0)
    brought = {path.name: path.read_text() for path in (sight.folder.artifacts / "outputs").iterdir()}
    assert brought == {"early.txt": "step 1", "late.txt": "saved"}
    error = error_of(home)
    assert (error.code, "--idle" in error.hint, str(sight.folder.artifacts) in error.hint) == ("train.idle", True, True)
    assert [row.problems for row in audit(home).rows] == [()]


def error_of(home: Home) -> GpurunError:
    """Return the error that a terminal shows at the end of the run."""
    (error,) = show_finished(Session(home=home, quiet=True, clock=SystemClock()), look_at_run(home, "fox-41")).errors
    return error


def test_the_git_commit_is_in_the_environment_without_its_folder(tmp_path: Path) -> None:
    (lab := tmp_path / "lab").mkdir()
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        git(lab, *words)
    commit = git(lab, "rev-parse", "HEAD")
    script = "import os, subprocess; print(os.environ['GPURUN_GIT_COMMIT'], flush=True)\n"
    script += "subprocess.run(['git', 'rev-parse', 'HEAD'], check=True)\n"
    driven, sight = command_run(Home(tmp_path / "home"), lab, script)
    assert driven.returncode == ExitCode.TRAINING_FAILED, driven.stderr
    assert commit in sight.folder.log.read_text()
    error = error_of(Home(tmp_path / "home"))
    assert "$GPURUN_GIT_COMMIT" in error.hint
    assert "saved" not in error.hint, "it wrote no file"


@pytest.mark.parametrize(
    ("words", "status", "cure"),
    [
        ("x", {"exit_code": 137, "oom_kills": 1, "memory_bytes": 16 << 30}, "more memory"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.", {"shm_bytes": 64 << 20}, "67 MB"),
        ("fatal: not a git repository", {}, ""),
        ("CUDA error: an illegal memory access", {"exit_code": 137, "oom_kills": 0, "memory_bytes": 16 << 30}, ""),
    ],
    ids=["killed for memory", "shared memory", "the trainer needs no git", "killed by somebody"],
)
def test_a_failure_is_shown_with_the_cure_of_its_own_cause_alone(
    world: World, words: str, status: dict[str, int], cure: str
) -> None:
    poll = world.far.poll

    def reported(wants: Any) -> Poll:
        answer = poll(wants)
        failed = {"exit_code": 1, **status} if answer.status.state == "exited" else {}
        return Poll(answer.status.model_copy(update=failed), answer.chunks)

    world.far.poll = reported  # type: ignore[method-assign]
    assert world.drive() is ExitCode.TRAINING_FAILED
    with world.folder.log.open("a") as log:
        log.write(words + "\n")
    (error,) = show_finished(
        Session(home=world.home, quiet=True, clock=world.clock), look_at_run(world.home, "fox-41")
    ).errors
    cures = ("more memory", "/dev/shm", "git")
    assert cure in error.hint
    if cure == "more memory":
        assert "memory of 17 GB" in error.what
    assert len([known for known in cures if known in error.hint]) == (1 if cure else 0), error.hint


def git(folder: Path, *words: str) -> str:
    who = {"GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x@x", "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x@x"}
    done = subprocess.run(
        ["git", "-C", str(folder), *words], env={**os.environ, **who}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
