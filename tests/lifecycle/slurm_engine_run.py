"""Helpers for tests that drive a run on the real Slurm."""

from __future__ import annotations

import json
from typing import Any

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import Mode, Plan
from gpurun.ledger.journal import read_journal
from gpurun.ledger.signing import payload_of
from gpurun.planning.own_box import LoginHere
from gpurun.providers.slurm.provider import Site, SlurmProvider
from tests.changed_plan import changed_plan
from tests.emulators.slurm.engine import Engine
from tests.lifecycle.drive import tiny_python
from tests.lifecycle.slurm_run import LEASE
from tests.lifecycle.tiny_runs import make_run

CLOCK = SystemClock()


def opened(engine: Engine, home: Home, steps: int, *, train_s: int = 240) -> RunFolder:
    """Open a run whose plan is a job of the engine's cluster, and return its folder."""
    home.prepare()
    python = tiny_python(home.root)
    home.config.write_text(f'[slurm.lab]\nhost = "local"\nworkdir = "{engine.work}"\npython = "{python}"\n')
    folder = make_run(home, steps=steps)
    provider = SlurmProvider([Site(engine.cluster, LoginHere())], CLOCK)
    offer = provider.offers(GpuNeed(count=0, name="cpu"), ())[0]
    plan = Plan.from_json(folder.plan.read_bytes())
    choices = plan.choices.model_copy(update={"region": "lab", "accept_cpu": True})
    lease = LEASE.model_copy(update={"train_s": train_s, "boot_s": 120, "destroy_s": 120})
    changes = {"offer": offer, "lease": lease, "mode": Mode.PAID, "choices": choices}
    folder.plan.write_text(changed_plan(plan, changes).to_json())
    return folder


def seen(folder: RunFolder, event: Event) -> None:
    """Wait at most 120 s until the journal has an event."""
    for _ in ticks(CLOCK, 0.1, 120):
        if folder.journal.exists() and any(record.event is event for record in read_journal(folder.journal).records):
            return
    raise AssertionError(f"there is no {event}")


def paid(folder: RunFolder) -> tuple[str, float]:
    """Return the number of the run's Slurm job and its billable seconds, both from the receipt."""
    receipt: dict[str, Any] = json.loads(payload_of(json.loads(folder.receipt.read_bytes())))["predicate"]
    (rental,) = receipt["cost"]["rentals"]
    return str(receipt["instance"]["id"]).rpartition("/")[2], float(rental["billable_s"])
