"""Paid runs with loss curves and samples, for tests of the report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpurun.core.money import Micros
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Offer
from gpurun.core.run_plan import DataSummary, Estimate, Lease, Mode, Plan
from tests.unit.ledger_samples import RATE, CloudRun

TOKENS_PER_STEP = 1024
PROMPTS = ("The ", "def ")


def plan_of(
    run: str,
    *,
    lr: float = 3e-4,
    mode: Mode = Mode.PAID,
    source: str = "stdlib",
    tokenizer: str = "char",
    preset: str = "faithful",
) -> Plan:
    """Return a plan with this learning rate and preset, and with data digests made from `source` and `tokenizer`."""
    offer = Offer(
        provider="runpod", type_id="H100-SXM", gpu="H100", gpu_count=1, vram_gb=80, region="EU-RO-1",
        rate_micros_per_hour=Micros(RATE), billing_unit_s=1, boot_s=60, price_source="test", dies_by_itself="pod key",
    )  # fmt: skip
    data = DataSummary(
        folder="/nowhere", tokenizer=tokenizer, tokenizer_sha256=hashlib.sha256(tokenizer.encode()).hexdigest(),
        vocab_size=64, train_tokens=1, val_tokens=1, bytes=1,
        sha256=hashlib.sha256(source.encode()).hexdigest(), source=source,
    )  # fmt: skip
    settings = {"model": {"preset": preset}, "optim": {"lr": lr}, "train": {"steps": 120, "seed": 42}}
    return Plan(
        run=run, mode=mode, recipe="tiny", form="rehearsal" if mode is Mode.REHEARSAL else "full",
        recipe_sha256="0" * 64, resolved={"about": "x", **settings},
        parameters=100_000, processes=1, offer=offer,
        estimate=Estimate(fits=True, peak_bytes=1, micro_batch=1, tokens_per_s=None, train_s=None, basis="a test"),
        lease=Lease(boot_s=20, ship_s=20, train_s=60, collect_s=20, destroy_s=20),
        cap_micros=Micros(12_000_000), expected_micros=Micros(1), worst_micros=Micros(2), candidates=(), data=data,
        bundle_sha256="0" * 64, ship_files=3, ship_bytes=4096,
    )  # fmt: skip


def events(top: float = 4.0, said: str = "") -> list[dict[str, Any]]:
    """Return a trainer's events: 120 steps of falling loss, and two evaluations with a sample of each prompt."""
    start = {"kind": "start", "step": 0, "elapsed_s": 5.0, "device": "cuda", "cuda_name": "NVIDIA H100", "steps": 120}
    lines = [start | {"tokens_per_step": TOKENS_PER_STEP, "train_tokens": 61_440}]
    for step in range(10, 121, 10):
        lines.append({"kind": "step", "step": step, "elapsed_s": 5.0 + step, "loss": top - step / 60})
        if step % 60 == 0:
            lines.append({"kind": "eval", "step": step, "elapsed_s": 5.5 + step, "val_loss": top + 0.1 - step / 60})
            lines[-1] |= {"bits_per_byte": 1.25, "hellaswag": 0.294 if step == 120 else None}
            lines += [
                {"kind": "sample", "step": step, "elapsed_s": 6.0 + step, "prompt": p, "text": f"{p}{said}{step}"}
                for p in PROMPTS
            ]
    return [*lines, {"kind": "stop", "step": 120, "elapsed_s": 127.0, "reason": "done", "train_s": 122.0}]


def write_events(folder: RunFolder, events: Iterable[dict[str, Any] | bytes]) -> None:
    """Write events as the trainer writes them.

    An event given as bytes becomes a line unchanged, even an invalid one.
    """
    lines = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    folder.events.write_bytes(b"".join(line + b"\n" for line in lines))


def opened_run(home: Home, name: str, *, said: str = "", **plan: Any) -> CloudRun:
    """Return a run with its plan and its events, and an empty journal."""
    run = CloudRun(home, name)
    run.folder.plan.write_text(plan_of(name, **plan).to_json())
    write_events(run.folder, events(said=said))
    return run


def finished_run(home: Home, name: str, **kinds: Any) -> RunFolder:
    """Return the folder of a whole run with its receipt."""
    return opened_run(home, name, **kinds).until_gone().settle().folder


def page_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")
