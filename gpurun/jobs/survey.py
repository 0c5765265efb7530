"""Lists the files that a run uploads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpurun.core.run_plan import Plan
from gpurun.remote.archive import Elsewhere, PackedFile, Survey, survey


def surveyed(plan: Plan, trainer: Path) -> Survey:
    """Return the files that a run needs on the machine; shards that the machine downloads are listed by digest."""
    workload = plan.job.workload(plan, trainer, cpus=1)
    here = survey(workload.uploads, workload.allowed)
    public = tuple(PackedFile(f"data/{file.name}", file.bytes, Elsewhere(file.sha256)) for file in plan.data.public)
    return replace(here, files=tuple(sorted((*here.files, *public), key=lambda file: file.name)))
