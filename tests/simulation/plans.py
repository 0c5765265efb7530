"""The plan of a simulated run: one offer of each profile, and a cap that pays for so many machines to the micro."""

from __future__ import annotations

import json

from gpurun.core.command import EVERYTHING, Command
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Choices, DataSummary, Estimate, Lease, Mode, Plan
from gpurun.jobs.dev_box import KEEP, DevBoxJob
from gpurun.jobs.trainer import CHECKPOINT_BYTES, KEPT_CHECKPOINTS
from gpurun.planning.budget import worst_case
from gpurun.planning.transfer import Load
from tests.emulators.fake import Profile

RUN = "fox-41"
LEASE = Lease(boot_s=300, ship_s=60, train_s=120, collect_s=60, destroy_s=120, kill_allowance_s=60)
PARAMETERS, DISK_GB = 1000, 50


STEPS, EVERY = 30, 5


def make_plan(
    home: Home,
    profiles: list[Profile],
    machines: int,
    run: str = RUN,
    *,
    legs: int = 0,
    train_s: float = 0.0,
    is_dev_box: bool = False,
) -> Plan:
    """A plan over one offer of each profile, with a cap that pays for `machines` of the dearest, to their deadlines.

    With `legs` it may continue on so many machines, and it is known that training takes `train_s`.
    """
    plan = _training(home, profiles, machines, run, legs=legs, train_s=train_s)
    if not is_dev_box:
        return plan
    size = KEPT_CHECKPOINTS * CHECKPOINT_BYTES * PARAMETERS
    command = Command(argv=KEEP, outputs=EVERYTHING, grace_s=10, disk_gb=DISK_GB, output_bytes=size)
    (home.root / "box" / "work").mkdir(parents=True)
    job = DevBoxJob(recipe="dev box", recipe_sha256="0" * 64, command=command)
    data = DataSummary(folder="", beside=str(home.root / "box"), bytes=0, sha256="0" * 64, source="no data")
    return plan.model_copy(update={"job": job, "data": data})


def _training(home: Home, profiles: list[Profile], machines: int, run: str, *, legs: int, train_s: float) -> Plan:
    home.prepare()
    data = home.root / "shards"
    data.mkdir(exist_ok=True)
    (data / "data.json").write_text(json.dumps({"v": 1, "train": [], "val": []}))
    known = (train_s, train_s) if legs else None
    guess = Estimate(fits=True, peak_bytes=1, micro_batch=1, tokens_per_s=None, train_s=known, basis="simulated")
    load = Load(ship_bytes=0, collect_bytes=KEPT_CHECKPOINTS * CHECKPOINT_BYTES * PARAMETERS, disk_gb=DISK_GB)
    found = []
    for place, profile in enumerate(profiles):
        offer = _offer(profile, place)
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
        recipe="tiny",
        form="full",
        recipe_sha256="0" * 64,
        resolved={
            "train": {"steps": STEPS, "micro_batch": 1, "checkpoint_every": EVERY},
            "hardware": {"disk_gb": DISK_GB},
        },
        parameters=PARAMETERS,
        processes=1,
        offer=first.offer,
        estimate=guess,
        lease=LEASE,
        cap_micros=usd(0) + machines * max(one.worst_micros or usd(0) for one in found),
        expected_micros=first.expected_micros or usd(0),
        worst_micros=first.worst_micros or usd(0),
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
        choices=Choices(keep_going=True, legs=legs) if legs else Choices(),
    )


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
