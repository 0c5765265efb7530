"""Helpers shared by test_stage.py and other tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from gpurun.core.paths import Home, RunFolder, write_atomic
from gpurun.core.run_plan import Plan
from gpurun.ledger.journal import read_journal
from tests.lifecycle import tiny_runs

SIZE = 3 << 20


def staged_run(home: Home, name: str = "fox-41", **train: Any) -> RunFolder:
    """Open a run with a bucket and two shards, one of them large enough to be staged."""
    folder = tiny_runs.make_run(home, name, **train)
    plan = Plan.from_json(folder.plan.read_bytes())
    (Path(plan.data.folder) / "train_000002.bin").write_bytes(random.Random(7).randbytes(SIZE))
    plan = plan.model_copy(update={"choices": plan.choices.model_copy(update={"stage": "s3://shards/gpt"})})
    write_atomic(folder.plan, plan.to_json().encode())
    return folder


def last_data(folder: RunFolder, event: str) -> dict[str, Any]:
    return next(r.data for r in reversed(read_journal(folder.journal).records) if r.event == event)


def incidents(folder: RunFolder) -> list[str]:
    return [str(r.data["code"]) for r in read_journal(folder.journal).records if r.event == "incident"]
