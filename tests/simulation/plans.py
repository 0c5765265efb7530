"""The plan of a simulated run: one offer for each profile, and a cap that pays for exactly `machines` machines."""

from __future__ import annotations

import json

from gpurun.core.command import EVERYTHING, Command
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Choices, DataSummary, Estimate, Job, Lease, Mode, Plan
from gpurun.core.sweep import make_sweep
from gpurun.jobs.dev_box import KEEP, DevBoxJob
from gpurun.jobs.sweep import SweepJob
from gpurun.jobs.trainer import CHECKPOINT_BYTES, KEPT_CHECKPOINTS, TrainerJob
from gpurun.planning.budget import worst_case
from gpurun.planning.transfer import Load
from tests.changed_plan import as_shipped
from tests.emulators.fake import Profile

RUN = "fox-41"
LEASE = Lease(boot_s=300, ship_s=60, train_s=120, collect_s=60, destroy_s=120, kill_allowance_s=60)
PARAMETERS, DISK_GB = 1000, 50


STEPS, EVERY = 30, 5
DEARER = 3
"""The price on demand, as a multiple of the spot price."""


def make_plan(
    home: Home,
    profiles: list[Profile],
    machines: int,
    run: str = RUN,
    *,
    legs: int = 0,
    train_s: float = 0.0,
    kind: str = "trainer",
) -> Plan:
    """Return a plan with one offer for each profile; its cap pays for `machines` whole leases at the dearest offer.

    The job is the training of a tiny recipe, a sweep over it, or a dev box. With `legs` the run may use up to that many
    machines, and the plan states that training takes `train_s` seconds.
    """
    plan = _on_each(home, profiles, machines, run, _job(kind), legs=legs, train_s=train_s)
    if kind != "dev_box":
        return as_shipped(plan)
    (home.root / "box" / "work").mkdir(parents=True, exist_ok=True)
    data = DataSummary(folder="", beside=str(home.root / "box"), bytes=0, sha256="0" * 64, source="no data")
    return as_shipped(plan.model_copy(update={"data": data}))


def _on_each(
    home: Home, profiles: list[Profile], machines: int, run: str, job: Job, *, legs: int, train_s: float
) -> Plan:
    home.prepare()
    data = home.root / "shards"
    data.mkdir(exist_ok=True)
    (data / "data.json").write_text(json.dumps({"v": 1, "train": [], "val": []}))
    known = (train_s, train_s) if legs else None
    guess = Estimate(fits=True, peak_bytes=1, micro_batch=1, tokens_per_s=None, train_s=known, basis="simulated")
    load = Load(ship_bytes=0, collect_bytes=job.home_bytes, disk_gb=job.disk_gb)
    found = []
    for place, profile in enumerate(profiles):
        offer = _on_spot(_offer(profile, place)) if legs else _offer(profile, place)
        worst = worst_case(offer, LEASE, load)
        found.append(
            Candidate(
                offer=offer, estimate=guess, lease=LEASE, expected_micros=worst, worst_micros=worst, finishes=True
            )
        )
    first = found[0]
    return Plan(
        run=run,
        mode=Mode.PAID,
        job=job,
        processes=1,
        chosen=first,
        cap_micros=usd(0) + machines * max(candidate.worst_micros or usd(0) for candidate in found),
        candidates=tuple(found),
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
        ship_files=1,
        ship_bytes=64,
        choices=Choices(keep_going=True, legs=legs, spot=True) if legs else Choices(),
    )


def _on_spot(offer: Offer) -> Offer:
    """Return the offer as a spot offer whose on-demand price is DEARER times its own price."""
    on_demand = usd(0) + DEARER * offer.rate_micros_per_hour
    return offer.model_copy(update={"spot": True, "on_demand_micros_per_hour": on_demand})


def _job(kind: str) -> Job:
    if kind == "dev_box":
        size = KEPT_CHECKPOINTS * CHECKPOINT_BYTES * PARAMETERS
        command = Command(argv=KEEP, outputs=EVERYTHING, grace_s=10, disk_gb=DISK_GB, output_bytes=size)
        return DevBoxJob(recipe="dev box", recipe_sha256="0" * 64, command=command)
    train = {"steps": STEPS, "micro_batch": 1, "checkpoint_every": EVERY}
    resolved = {"train": train, "hardware": {"disk_gb": DISK_GB}}
    job = TrainerJob(recipe="tiny", recipe_sha256="0" * 64, form="full", resolved=resolved, parameters=PARAMETERS)
    if kind == "trainer":
        return job
    sweep = make_sweep({"optim.lr": ("1e-3", "3e-4", "1e-4")}, {"keep": 2})
    return SweepJob(recipe="sweep of tiny", recipe_sha256="0" * 64, sweep=sweep, at_once=2, trial=job)


def _offer(profile: Profile, place: int) -> Offer:
    return Offer(
        provider=profile.name,
        type_id=f"gpu_1x_a100_{place}",
        gpu="A100",
        gpu_count=1,
        vram_gb=80,
        region=f"region-{place}",
        rate_micros_per_hour=usd(2 + place),
        billing_unit_s=profile.billing_unit_s,
        boot_s=LEASE.boot_s,
        price_source="simulated",
        dies_by_itself="NO · laptop only" if profile.timer == "none" else "yes",
    )
