"""Tests of a sweep of the course's recipe as two jobs of the real Slurm. Skipped where Slurm is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import InstanceState
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from gpurun.planning.own_box import LoginHere
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.emulators.slurm import missing
from tests.emulators.slurm.engine import Engine, running
from tests.later import LATER
from tests.lifecycle.commands_here import SMALL, Person, kill_supervisor

CLOCK = SystemClock()
pytestmark = [LATER, pytest.mark.skipif(bool(missing()), reason=missing() or "it is here")]
TWELVE = ("--set", "optim.lr=1e-3,3e-3,1e-2", "--set", "model.layers=1,2", "--set", "train.seed=1,2")


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("slurm") / "root") as made:
        yield made


@pytest.fixture
def person(engine: Engine, own_home: Path, tmp_path: Path) -> Person:
    person = Person(own_home, tmp_path / "lab")
    (person.folder / "text.txt").write_text("To be, or not to be, that is the question. " * 8)
    table = f'[slurm.lab]\nhost = "local"\nworkdir = "{engine.work}"\npython = "{sys.executable}"\n'
    Home(own_home).prepare().config.write_text(table)
    return person


def sweeps(person: Person, *words: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    place = ("--provider", "slurm", "--gpu", "2xcpu", "--accept-cpu", "--max-gpu-hours", "1", "--time", "30m")
    usual = ("--yes", "--json", "--name", "fox-41", "--data", "text.txt", *place)
    return person.types("sweep", "course-lab", *usual, *SMALL, *TWELVE, *words, timeout_s=timeout_s)


def trials(folder: RunFolder) -> list[dict[str, Any]]:
    lines = folder.events.read_text().splitlines() if folder.events.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "trial"]


def check_promises(engine: Engine, person: Person) -> list[dict[str, Any]]:
    """Assert that both jobs are gone, all twelve trials ran once, and the audit passes; return the receipt's rows."""
    home = Home(person.home)
    folder = home.run("fox-41")
    receipt = read_receipt(home, folder).predicate
    rows: list[dict[str, Any]] = receipt["training"]["trials"]["rows"]
    assert [row["trial"] for row in rows] == list(range(1, 13))
    assert {row["state"] for row in rows} == {"done"}
    assert len({tuple(sorted(row["params"].items())) for row in rows}) == 12
    begun = [event["trial"] for event in trials(folder) if event["state"] == "running" and event["step"] is None]
    assert sorted(begun) == list(range(1, 13))
    assert receipt["instance"]["jobs"] == 2
    found = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK).find(None)
    assert {instance.state for instance in found} <= {InstanceState.GONE}
    assert list(engine.work.iterdir()) == []
    assert [row.problems for row in audit(home).rows] == [()]
    return rows


def test_twelve_trials_as_two_jobs_of_the_real_slurm(engine: Engine, person: Person) -> None:
    done = sweeps(person)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = check_promises(engine, person)
    states = engine.ask("squeue", "-h", "-r", "-t", "all", "-o", "%T").stdout.split()
    assert states == ["COMPLETED", "COMPLETED"]

    best = next(row for row in rows if row["trial"] == person.receipt()["training"]["trials"]["best"])
    own = [word for name, value in best["params"].items() for word in ("--set", f"{name}={value}")]
    alone = ("train", "course-lab", "--data", "text.txt", "--provider", "local", "--yes", "--name", "fox-42")
    assert person.types(*alone, *SMALL, *own, timeout_s=300).returncode == 0
    assert best["result"] == person.receipt("fox-42")["training"]["figures"]["best_val_loss"]


def test_the_laptop_dies_in_the_fifth_trial_on_the_real_slurm(engine: Engine, person: Person) -> None:
    assert sweeps(person, "--detach").returncode == 0
    folder = Home(person.home).run("fox-41")
    for _ in ticks(CLOCK, 0.1, 240):
        if any(event["trial"] == 5 for event in trials(folder)):
            break
    inside = person.types("ssh", "fox-41", "--", "sh", "-c", 'echo "$SLURM_JOB_ID"; ls ../../agent')
    assert "job.json" in inside.stdout, inside.stderr
    kill_supervisor(person.home)
    resumed = person.types("resume", "fox-41", timeout_s=600)
    assert resumed.returncode == 0, resumed.stderr
    check_promises(engine, person)


def test_a_node_dies_under_a_trial_and_it_is_begun_again(engine: Engine, person: Person) -> None:
    assert sweeps(person, "--detach").returncode == 0
    folder = Home(person.home).run("fox-41")
    for _ in ticks(CLOCK, 0.1, 240):
        if any(event["trial"] == 3 for event in trials(folder)):
            break
    (lead,) = {instance.id for instance in SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK).find(None)}
    engine.ask("scancel", f"{lead.rpartition('/')[2].removesuffix('_0')}_1")
    assert person.types("resume", "fox-41", timeout_s=600).returncode == 0
    receipt = read_receipt(Home(person.home), folder).predicate
    assert {row["state"] for row in receipt["training"]["trials"]["rows"]} == {"done"}
    assert len(receipt["training"]["trials"]["rows"]) == 12
    assert [row.problems for row in audit(Home(person.home)).rows] == [()]
