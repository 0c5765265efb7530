"""Fixtures and helpers for tests that drive a run as a job of the scripted Slurm."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, cost_of, usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed, Teardown
from gpurun.core.run_plan import Lease, Mode, Plan
from gpurun.ledger.audit import audit, event_sequence
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.steps import close_run
from gpurun.planning.own_box import LoginHere
from gpurun.providers.base import Traits
from gpurun.providers.slurm.provider import Site, SlurmProvider
from gpurun.remote import job_machine
from tests.changed_plan import changed_plan
from tests.emulators.slurm import ScriptedSlurm, scripted_slurm
from tests.lifecycle.drive import drive_forked, tiny_python
from tests.lifecycle.tiny_runs import make_run, trainer_events

CLOCK = SystemClock()
FREE, SHARD = usd(0), "train_000001.bin"
LEASE = Lease(boot_s=20, ship_s=20, train_s=60, collect_s=20, destroy_s=20, kill_allowance_s=60, queue_s=600)
KILLS = ("create.intended", "create.observed", "ready.observed", "train.started", "death.read")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


@pytest.fixture
def slurm(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSlurm]:
    quick = Traits(
        settle_s=0.5, poll_s=0.1, death_reads=3, death_spread_s=0.3, teardown=Teardown.RELEASED, console_url=""
    )
    monkeypatch.setattr(SlurmProvider, "traits", quick)
    monkeypatch.setitem(event_sequence._PROOF, Teardown.RELEASED, (3, quick.death_spread_s))
    monkeypatch.setattr(close_run, "CLEAR_POLL_S", 0.05)
    monkeypatch.setattr(job_machine, "TAKEN_S", 2)
    with scripted_slurm(tmp_path) as made:
        home.config.write_text(
            made.table.replace(f'python = "{made.cluster.python}"', f'python = "{tiny_python(home.root)}"')
        )
        yield made


def opened(
    home: Home, slurm: ScriptedSlurm, *, steps: int = 30, nodes: int = 1, step_s: float = 0.002, price: Micros = FREE
) -> RunFolder:
    """Open a run whose plan is a job of the scripted cluster, and return its folder."""
    folder = make_run(home, steps=steps, step_s=step_s)
    cluster, need = replace(slurm.cluster, price_per_gpu_hour=price), GpuNeed(count=0, name="cpu", nodes=nodes)
    offer = SlurmProvider([Site(cluster, LoginHere())], CLOCK).offers(need, ())[0]
    worst = {name: cost_of(price, LEASE.total_s + LEASE.kill_allowance_s) for name in ("worst_micros", "cap_micros")}
    plan = Plan.from_json(folder.plan.read_bytes())
    choices = plan.choices.model_copy(update={"region": "lab", "accept_cpu": True})
    changes = {"offer": offer, "processes": nodes, "lease": LEASE, "mode": Mode.PAID, "choices": choices, **worst}
    folder.plan.write_text(changed_plan(plan, changes).to_json())
    return folder


def begin(home: Home, **environment: str) -> ForkProcess:
    """Start to drive the run in a forked process, where the monkeypatches of this process still apply."""
    arguments = (home.root, "fox-41", {**os.environ, **environment}, home.root / "driven.txt")
    child = multiprocessing.get_context("fork").Process(target=drive_forked, args=arguments)
    child.start()
    return child


def ended(child: ForkProcess, home: Home) -> int:
    """Wait for the driving process and return its exit code: -9 if a crash point killed it."""
    child.join(timeout=180)
    assert child.exitcode is not None, (home.root / "driven.txt").read_text()
    return child.exitcode


def drive(home: Home, **environment: str) -> int:
    """Drive the run to its end and return the exit code."""
    return ended(begin(home, **environment), home)


def events_of(folder: RunFolder) -> list[Event]:
    return [record.event for record in read_journal(folder.journal).records]


def check_promises(home: Home, folder: RunFolder, slurm: ScriptedSlurm) -> None:
    """Assert that only one job ran, completed and left no folder, and that the audit accepts the receipt."""
    assert slurm.jobs == ["1"]
    assert (slurm.state / "jobs" / "1" / "word").read_text() == "COMPLETED"
    assert list(slurm.work.iterdir()) == []
    assert events_of(folder).count(Event.DEATH_PROVEN) == 1
    assert [row.problems for row in audit(home).rows] == [()]
    assert [event["kind"] for event in trainer_events(folder)].count("start") == 1


def failure_of(folder: RunFolder) -> dict[str, Any]:
    """Return the journal's data of the run's first failed step."""
    records = read_journal(folder.journal).records
    return next(dict(record.data) for record in records if record.event is Event.STEP_FAILED)
