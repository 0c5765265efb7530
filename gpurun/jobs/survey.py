"""What a run ships, file by file, as its job has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpurun.core.run_plan import Plan
from gpurun.remote.archive import Elsewhere, PackedFile, Survey, survey


def surveyed(plan: Plan, trainer: Path) -> Survey:
    """Return what a run ships; the shards that the machine downloads itself are among it by digest."""
    workload = plan.job.workload(plan, trainer, cpus=1)
    here = survey(workload.uploads, workload.allowed)
    public = tuple(PackedFile(f"data/{file.name}", file.bytes, Elsewhere(file.sha256)) for file in plan.data.public)
    return replace(here, files=tuple(sorted((*here.files, *public), key=lambda file: file.name)))
