"""Fixed inputs of the golden files: one rented run, one local run, and rows for every table."""

from __future__ import annotations

import math
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.gpu_reading import GpuReading
from gpurun.core.journal_records import Event, Record
from gpurun.core.money import Figure, Micros, usd
from gpurun.core.orphans import Orphan, Owner
from gpurun.core.receipt_record import Receipt, Signature
from gpurun.core.records import Instance, InstanceState, Offer
from gpurun.core.run_plan import Candidate, DataSummary, Estimate, Lease, Mode, Plan
from gpurun.core.trainer_events import TrainerEvent, make_event
from gpurun.ledger.audit import AuditReport, AuditRow
from gpurun.ledger.spending import spent_by
from gpurun.readers.money_spent import MonthRow
from gpurun.view.budget_screen import BudgetRow, HoldRow
from gpurun.view.list_tables import Finding, PackRow, RecipeRow, RunRow
from gpurun.view.live_state import Screen
from tests import whole_records

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z
SHA = "9f2c" + "0" * 56 + "1ab4"


def offer(provider: str = "runpod", **changed: Any) -> Offer:
    fields: dict[str, Any] = {
        "provider": provider,
        "type_id": "h100-sxm",
        "gpu": "H100",
        "gpu_count": 1,
        "vram_gb": 80,
        "region": "EU-RO-1",
        "rate_micros_per_hour": usd("2.49"),
        "billing_unit_s": 1,
        "boot_s": 120,
        "price_source": "live",
        "dies_by_itself": "yes · pod key, armed at boot",
    }
    return Offer(**{**fields, **changed})


LOCAL = offer(
    "local",
    gpu="cpu",
    gpu_count=0,
    vram_gb=0,
    region="here",
    rate_micros_per_hour=usd(0),
    boot_s=15,
    dies_by_itself="yes · guard process",
)
LEASE = Lease(boot_s=540, ship_s=720, train_s=13_320, collect_s=540, destroy_s=360)
ESTIMATE = Estimate(
    fits=True,
    peak_bytes=61_000_000_000,
    micro_batch=32,
    tokens_per_s=(2e5, 2.4e5),
    train_s=(11_000.0, 11_520.0),
    basis="prior: 1 x 312 TFLOP/s at 45%-60% MFU, 6N+12LCT FLOPs a token",
)


def candidate(chosen: Offer, expected: str, slow: str, worst: str | None, **why: Any) -> Candidate:
    return Candidate(
        offer=chosen,
        estimate=ESTIMATE,
        lease=LEASE if worst else None,
        expected_micros=usd(expected),
        slow_micros=usd(slow),
        worst_micros=usd(worst) if worst else None,
        finishes=worst is not None,
        **why,
    )


def eight(provider: str, rate: str, **changed: Any) -> Offer:
    fields = {"gpu": "A100 SXM", "gpu_count": 8, "rate_micros_per_hour": usd(rate), "region": "any", **changed}
    return offer(provider, **fields)


_AWS = {"vram_gb": 40, "boot_s": 600, "dies_by_itself": "yes · power-off ends it, armed at boot"}
_LAMBDA = {"boot_s": 900, "dies_by_itself": "NO · laptop only"}
CANDIDATES = (
    candidate(offer(), "7.97", "8.40", "11.23"),
    candidate(eight("runpod", "11.12", tier="community"), "8.84", "9.61", "12.00"),
    candidate(eight("aws", "21.96", region="us-east-1", **_AWS), "10.31", "11.90", "12.00"),
    candidate(eight("aws", "21.96", region="eu-west-1", **_AWS), "10.40", "11.95", "12.00"),
    candidate(eight("lambda", "22.32", **_LAMBDA), "18.04", "19.12", None, obstacle="consent", needs_consent=True),
    candidate(
        eight("aws", "27.45", region="us-east-1", **_AWS), "18.04", "19.12", None, obstacle="cap", needed="$21.30"
    ),
)


def plan(mode: Mode = Mode.PAID, **changed: Any) -> Plan:
    rented = mode is Mode.PAID
    fields: dict[str, Any] = {
        "run": "fox-41",
        "mode": mode,
        "recipe": "gpt2-124m",
        "form": "rehearsal" if mode is Mode.REHEARSAL else "full",
        "recipe_sha256": SHA,
        "resolved": {"train": {"steps": 4768, "batch_tokens": 524_288}},
        "parameters": 124_475_904,
        "processes": 1 if rented else 2,
        "offer": offer() if rented else LOCAL,
        "estimate": ESTIMATE,
        "lease": LEASE,
        "cap_micros": usd(12) if mode is not Mode.LOCAL else None,
        "expected_micros": usd("7.97" if rented else 0),
        "worst_micros": usd("11.23" if rented else 0),
        "candidates": () if mode is Mode.LOCAL else CANDIDATES,
        "data": DataSummary(
            folder="shards",
            tokenizer="gpt2",
            tokenizer_sha256=SHA,
            vocab_size=50257,
            train_tokens=2_500_000_000,
            val_tokens=10_000_000,
            bytes=4_700_000_000,
            sha256=SHA,
            source="fineweb-edu",
        ),
        "bundle_sha256": SHA,
        "ship_files": 51,
        "ship_bytes": 4_700_000_000,
        "notes": ("Prices are from the packaged catalogue of 2026-11-20; a paid run reads the live ones.",),
    }
    return Plan(**{**fields, **changed})


RATE: dict[str, Any] = {
    "step": 60, "steps": 4768, "step_s": 2.4, "tokens_per_s": 218_453.0, "elapsed_s": 160.0, "left_s": 11_310.0,
    "limit_s": 13_100.0, "finishes": True, "ends_at_step": 4768, "expected_micros": 8_840_000,
    "cap_micros": 12_000_000, "needed_micros": None, "memory_peak_bytes": 61_000_000_000,
}  # fmt: skip


def record(seq: int, event: Event, wall: float, data: dict[str, Any]) -> Record:
    return whole_records.record(seq, event, wall, data, mono=wall - NOW)


INTENT: dict[str, Any] = {
    "attempt": 1, "token": "gr-fox-41", "rate_micros_per_hour": usd("2.49"), "billing_unit_s": 1,
    "lease": LEASE.model_dump(), "deadline_wall": NOW,
}  # fmt: skip
"""The fields of an intent that determine its cost."""


def story(begun: float, rate: Micros) -> list[Record]:
    """Return the journal of a run that is training."""
    deadline = begun + LEASE.total_s
    instance = {"id": "k3x9", "rate_micros_per_hour": rate}
    events: list[tuple[Event, float, dict[str, Any]]] = [
        (Event.RUN_OPENED, 0, {"recipe": "gpt2-124m", "provider": "runpod"}),
        (Event.CREATE_INTENDED, 1, {**INTENT, "provider": "runpod", "token": "gr-fox-41", "deadline_wall": deadline}),
        (Event.CREATE_OBSERVED, 4, {"instance": instance}),
        (Event.READY_OBSERVED, 109, {"id": "k3x9"}),
        (Event.SHIP_INTENDED, 110, {}),
        (Event.SHIP_OBSERVED, 472, {"bytes": 3_100_000_000, "files": 51}),
        (Event.TRAIN_INTENDED, 473, {}),
        (Event.TRAIN_STARTED, 475, {}),
        (Event.RATE_OBSERVED, 640, RATE),
    ]
    return [record(i, event, begun + after, data) for i, (event, after, data) in enumerate(events, 1)]


def checkpoint_files(*steps: int) -> list[dict[str, Any]]:
    """Return the files of whole checkpoints, as a record of a download lists them."""
    return [{"kind": kind, "step": step} for step in steps for kind in ("weights", "optimizer", "state")]


def ending(begun: float) -> list[Record]:
    """Return the records that follow when training is done."""
    events: list[tuple[Event, float, dict[str, Any]]] = [
        (Event.TRAIN_OBSERVED, 11_000, {"outcome": "done", "reason": "done"}),
        (Event.COLLECT_INTENDED, 11_001, {}),
        (Event.COLLECT_OBSERVED, 11_100, {"files": checkpoint_files(4500, 4750), "missing": []}),
        (Event.DESTROY_INTENDED, 11_101, {}),
        (Event.DESTROY_ASKED, 11_102, {"attempt": 1}),
        (Event.DEATH_READ, 11_120, {"state": "GONE"}),
        (Event.DEATH_PROVEN, 11_150, {"teardown": "destroyed", "reads": 3}),
        (Event.RECEIPT_OBSERVED, 11_151, {"seq": 17, "sha256": SHA}),
        (Event.RUN_CLOSED, 11_152, {"exit_code": 0}),
    ]
    return [record(i, event, begun + after, data) for i, (event, after, data) in enumerate(events, 9)]


def make_events(*events: dict[str, Any]) -> list[TrainerEvent]:
    """Return the trainer's events with these fields; fields without a `kind` give no event."""
    return [event for fields in events if (event := make_event(fields)) is not None]


def loss_at(step: int) -> float:
    return 3.0 + 7.9 * math.exp(-step / 300) + 0.6 * math.exp(-step / 3000) + 0.04 * math.sin(step * 1.7)


def trainer_events(begun: float, steps: int = 4768, until: int = 2410, *, cuda: bool = True) -> list[TrainerEvent]:
    """Return a trainer's events from its start to the step `until`."""
    events: list[dict[str, Any]] = [
        {
            "kind": "start", "wall": begun, "elapsed_s": 0.0, "step": 0, "device": "cuda" if cuda else "cpu",
            "cuda_name": "NVIDIA H100 80GB HBM3" if cuda else None, "world_size": 1 if cuda else 2,
            "parameters": 124_475_904, "steps": steps, "resumed_from": None,
        }
    ]  # fmt: skip
    for step in range(10, until + 1, 10):
        wall = begun + 2.36 * step
        events.append(
            {
                "kind": "step", "wall": wall, "elapsed_s": 2.36 * step, "step": step, "loss": loss_at(step),
                "lr": 6e-4 * (1 - step / steps), "grad_norm": 0.83, "step_s": 2.36, "tokens_per_s": 222_000.0 - step,
                "tokens": step * 524_288, "mfu": 0.39 if cuda else None,
                "memory_peak_bytes": 61_000_000_000 if cuda else None,
            }
        )  # fmt: skip
        if step % 250 == 0:
            events.append({"kind": "eval", "wall": wall, "step": step, "val_loss": loss_at(step) + 0.05})
            events.append({"kind": "checkpoint", "wall": wall, "step": step, "bytes": 1_400_000_000, "files": []})
    return make_events(*events)


def log_lines(until: int = 2410) -> list[str]:
    return [
        f"step {step:04d} | loss {loss_at(step):.4f} | lr {6e-4 * (1 - step / 4768):.2e} | elapsed {2.36 * step:.1f} s"
        for step in range(until - 90, until + 1, 10)
    ]


def rented_screen() -> tuple[Screen, float]:
    """Return the live view of a rented run half way, and the time that it shows."""
    begun = NOW - 6163
    screen = Screen(plan(), spent_by)
    screen.update(story(begun, usd("2.49")), trainer_events(begun + 475), log_lines())
    for seconds, percent in enumerate((12, 71, 93, 97, 95, 94)):
        screen.update((), (), (), gpus=GpuReading(NOW + 5 * seconds, 1, percent, 62_464, 81_920, 71, 608))
    return screen, NOW


def local_screen() -> tuple[Screen, float]:
    """Return the live view of an ended rehearsal on this computer, and the time that it shows."""
    begun = NOW - 11_160
    screen = Screen(plan(Mode.REHEARSAL), spent_by)
    events = trainer_events(begun + 475, 4768, 4760, cuda=False)
    screen.update([*story(begun, usd(0)), *ending(begun)], events, log_lines(4760))
    return screen, NOW


def found_machine(provider: str, identifier: str, run: str, created_wall: float, deadline_wall: float) -> Instance:
    return Instance(
        id=identifier, provider=provider, token="gr-1", run=run, state=InstanceState.RUNNING,
        rate_micros_per_hour=usd("2.49"), created_wall=created_wall, deadline_wall=deadline_wall,
    )  # fmt: skip


RUNS = (
    RunRow("owl-07", "mini-gpt", "local", "closed", 500, 500, NOW - 90_000, usd(0), usd(0)),
    RunRow(
        "fox-41", "gpt2-124m", "runpod EU-RO-1", "training", 2410, 4768, NOW - 6163, usd("4.34"), usd("11.23"),
        NOW + 9300, "pod key", live=True,
    ),
    RunRow(
        "elk-33", "gpt2-124m", "lambda us-west-3", "destroying", 4768, 4768, NOW - 16_000, usd("9.99"), usd("11.23"),
        NOW - 600, "laptop only", may_be_billing=True,
    ),
)  # fmt: skip
RECIPES = (
    RecipeRow(
        "gpt2-124m", 124_475_904, 2_500_000_000, "8xA100", "GPT-2 124M on FineWeb-Edu, as nanoGPT and llm.c train it"
    ),
    RecipeRow(
        "mini-gpt", 112_384, 122_880, "cpu", "A character model of this Python's own source, in a minute on a CPU"
    ),
)
AUDITED = (
    AuditRow("fox-41", 15, "ok", "ok", "2/2", "proven", usd("8.38"), "ok", False, Figure.MEASURED, (), ()),
    AuditRow("owl-07", 16, "ok", "ok", "1/2", "proven", usd("1.02"), "last checkpoint missing here", False,
             Figure.MEASURED, (), ("000110.state.json is missing",)),
    AuditRow("elk-33", 17, "ok", "none", "0/0", "NOT SEEN", usd("4.40"), "may be billing", True, Figure.FLOOR, (), ()),
)  # fmt: skip
AUDIT = AuditReport(AUDITED, head=SHA, total_micros=usd("13.80"), receipts=3, problems=())
BILLED = {"fox-41": usd("8.37"), "owl-07": usd("1.05")}
ORPHANS = (
    Orphan(found_machine("lambda", "0920582c7ff041399e34", "elk-33", NOW - 16_000, NOW - 600), "overdue", 600, 16_000,
           Owner("elsewhere", "3fa9c1")),
    Orphan(found_machine("runpod", "k3x9", "fox-41", NOW - 6163, NOW + 9300), "owned", 0, 6163,
           Owner("supervisor", "3fa9c1", "fox-41")),
)  # fmt: skip
PACKED = (
    PackRow("bundle/recipe.json", 1_204, SHA),
    PackRow("bundle/trainer/model.py", 9_120, SHA),
    PackRow("data/train_000001.bin", 200_001_024, SHA),
    PackRow("data/.env", 120, refusal="looks like a secret; name it with --allow data/.env if it is none"),
)
SETTINGS = (
    ("recipe", "gpt2-124m", "built in"),
    ("max_cost", "12", "environment GPURUN_MAX_COST"),
    ("providers", "", "built in"),
)
FINDINGS = (
    Finding("ok", "python 3.12.11"),
    Finding("ok", "disk: 212 GB free for runs"),
    Finding("warn", "aws may run but not list in eu-west-1: reap cannot see that region", "add ec2:DescribeInstances"),
    Finding("bad", "lambda has no key", "gpurun auth set lambda"),
)
STAMPS = {"asked": 11_160, "exists": 11_157, "ready": 11_052, "shipped": 10_690, "train_start": 10_688}
PREDICATE: dict[str, Any] = {
    "v": 1,
    "run": "fox-41",
    "seq": 17,
    "prev": "7be1" + "0" * 56 + "90cd",
    "journal": {"head": SHA, "records": 20},
    "signing": {"keyid": SHA},
    "asked": {"mode": "paid", "recipe": "gpt2-124m", "form": "full", "provider": "runpod"},
    "digests": {
        **dict.fromkeys(("request", "plan", "recipe", "data", "trainer", "shipped"), SHA),
        **{name: {"bytes": 9, "sha256": SHA} for name in ("log", "events")},
    },
    "shipping": {"is": "measured", "by_ssh_bytes": 1_900_000, "bucket": "s3://shards", "to_bucket_bytes": 0,
                 "from_bucket_bytes": 5_000_000_000},
    "gpurun": {"version": "0.1.0"},
    "platform": "Linux x86_64",
    "instance": {
        "is": "provider-reported", "provider": "runpod", "id": "k3x9", "token": "gr-fox-41-7f3a91", "type": "H100 80G",
        "region": "EU-RO-1", "gpu": "H100 80G", "gpu_count": 1, "created_wall": NOW - 11_157,
        "facts": {"is": "instance-reported", "hello": {"platform": "Linux x86_64", "torch": {"version": "2.9.1"}}},
    },
    "timeline": {
        "is": "measured",
        **{name: utc(NOW - ago) for name, ago in STAMPS.items()},
        "train_end": "unknown",
        "collected": "unknown",
        "gone": utc(NOW - 10),
    },
    "runtime": {
        "is": "measured",
        "billable_s": 11_940.0,
        "phases_s": {"boot": 105.0, "upload": 340.0, "unpack": 22.0, "training": 11_300.0, "collect": 130.0,
                     "destroy": 43.0, "other": 0.0},
        "training": {"is": "instance-reported", "seconds": {"import": 21.0, "compile": 94.0, "steps": 10_950.0}},
        "planned": {
            "is": "planned",
            "limits_s": {"boot": 300, "upload": 420, "training": 13_320, "collect": 120, "destroy": 120},
            "training_s": [9_000.0, 12_600.0],
        },
    },
    "cost": {
        "is": "measured", "upper_bound_micros": usd("8.38"), "billed_micros": None, "billed_is": "unknown",
        "worst_micros": usd("11.23"), "cap_micros": usd(12), "cap_kept": True, "rentals": [],
    },
    "training": {
        "outcome": "done", "reason": "done", "message": "", "exit_code": 0, "failed_step": None,
        "seconds": {"is": "measured", "train_s": 11_252.0},
        "device": "cuda",
        "start": {"is": "instance-reported", "event": {"device": "cuda", "cuda_name": "NVIDIA H100 80GB HBM3"}},
        "figures": {"is": "instance-reported", "last_step": 4768, "last_loss": 3.2841, "best_val_loss": 3.284},
        "log": {"is": "instance-reported", "lines": [
            "device: cuda", "parameters: 124,475,904", "step 4768 | loss 3.2841 | lr 0.00e+00 | elapsed 11252.0 s"
        ]},
    },
    "checkpoint": {
        "latest": 4768, "best": {"step": 4500, "val_loss": 3.284}, "missing": [],
        "files": [
            {"name": "checkpoints/004768.model.safetensors", "bytes": 9, "sha256": SHA,
             "kind": "weights", "step": 4768},
            {"name": "checkpoints/004500.model.safetensors", "bytes": 9, "sha256": "51c0" + "0" * 56 + "e88d",
             "kind": "weights", "step": 4500},
        ],
    },
    "sample": {"step": 4768, "prompt": "def river(town):", "text": "def river(town):\n"
               "    # named for the town it floods each spring; chairs go upstairs\n\n    return town"},
    "teardown": {"is": "destroyed", "evidence": [{
        "token": "gr-fox-41-7f3a91", "teardown": "destroyed", "id": "k3x9", "reads": 3, "spread_s": 41.0,
        "evidence_sha256": "aa10" + "0" * 56 + "77fe", "readings": [],
    }]},
    "verdict": {"is": "gpu", "says": "GPU run complete: the log shows device cuda."},
    "incidents": [],
}  # fmt: skip


def receipt(predicate: dict[str, Any]) -> Receipt:
    """Return a signed receipt with this predicate."""
    kinds = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://gpurun.dev/receipt/v1"}
    statement: Any = {**kinds, "subject": [], "predicate": predicate}
    return Receipt(statement, {}, SHA, Signature.OK)


RECEIPT = receipt(PREDICATE)

BUDGETS = (
    BudgetRow("month", usd(50), usd("2.37"), usd(5), usd("42.63"), (HoldRow("elk-42", usd(5), NOW + 3600),)),
    BudgetRow("without a limit", None, 0, 0, None),
)
SPENT = (MonthRow("2026-11", "runpod", "gpt2-124m", 2, usd("4.74")),)
