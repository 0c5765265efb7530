"""Helpers for runs that take a second: a real local instance, the real agent, and a trainer without torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.clock import SystemClock
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import DataSummary, Estimate, Lease, Mode, Plan, Request
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import create_run
from gpurun.providers.local import LocalProvider
from tests.changed_plan import as_shipped, changed_plan
from tests.lifecycle.drive import drive_forked

DRIVE = Path(__file__).with_name("drive.py")


def make_run(
    home: Home, name: str = "fox-41", *, steps: int = 40, lease: Lease | None = None, **train: Any
) -> RunFolder:
    """Open a run whose plan is ready to be driven, and return its folder."""
    home.prepare()
    data = home.root / "shards"
    data.mkdir(exist_ok=True)
    (data / "data.json").write_text(json.dumps({"v": 1, "train": [], "val": []}))
    (data / "train_000001.bin").write_bytes(bytes(range(256)) * 8)
    offer = LocalProvider(home, SystemClock()).offers(GpuNeed(count=0, name="cpu"), ())[0]
    plan = Plan(
        run=name,
        mode=Mode.LOCAL,
        recipe="tiny",
        form="full",
        recipe_sha256="0" * 64,
        resolved={"train": {"steps": steps, "micro_batch": 1, **train}, "hardware": {"disk_gb": 1}},
        parameters=1000,
        processes=1,
        offer=offer,
        estimate=Estimate(fits=True, peak_bytes=1, micro_batch=1, tokens_per_s=None, train_s=None, basis="a test"),
        lease=lease or Lease(boot_s=20, ship_s=20, train_s=60, collect_s=20, destroy_s=20, kill_allowance_s=5),
        cap_micros=None,
        expected_micros=usd(0),
        worst_micros=usd(0),
        candidates=(),
        data=DataSummary(
            folder=str(data),
            tokenizer="char",
            tokenizer_sha256="0" * 64,
            vocab_size=64,
            train_tokens=1000,
            val_tokens=100,
            bytes=2048,
            sha256="0" * 64,
            source="stdlib",
        ),
        bundle_sha256="0" * 64,
        ship_files=3,
        ship_bytes=4096,
    )
    return create_run(home, Request(recipe="tiny", providers=("local",)), as_shipped(plan))


def setting_up(folder: RunFolder, script: str, limit_s: int | None = None) -> None:
    """Change the plan so that a script sets up the machine within `limit_s` seconds, or within the lease's limit."""
    plan = Plan.from_json(folder.plan.read_bytes())
    changes = {"choices": plan.choices.model_copy(update={"setup": script})}
    changes |= {"lease": plan.lease.model_copy(update={"setup_s": limit_s})} if limit_s is not None else {}
    folder.plan.write_text(changed_plan(plan, changes).to_json())


def start(home: Home, name: str = "fox-41", **environment: str) -> subprocess.Popen[str]:
    """Start a process that drives a run."""
    return subprocess.Popen(
        [sys.executable, str(DRIVE), str(home.root), name],
        env={**os.environ, "PYTHONPATH": str(DRIVE.parents[2]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Driven:
    """The end of a process that drove a run: its exit code (-9 after a SIGKILL) and its standard error."""

    returncode: int
    stderr: str


def drive(home: Home, name: str = "fox-41", **environment: str) -> Driven:
    """Drive a run in another process until that process ends or is killed.

    The process is forked from a server that has imported gpurun, because the imports would take half of its time.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([drive_forked.__module__])
    errors = home.root / "driven.txt"
    child = forks.Process(target=drive_forked, args=(home.root, name, {**os.environ, **environment}, errors))
    child.start()
    child.join(timeout=120)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError(f"{name} was driven for 120 s: {errors.read_text()}")
    return Driven(child.exitcode, errors.read_text())


def events_of(folder: RunFolder) -> list[str]:
    return [str(record.event) for record in read_journal(folder.journal).records]


def trainer_events(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.events.read_text().splitlines()]
