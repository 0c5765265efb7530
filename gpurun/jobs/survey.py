"""Lists the files that a run uploads, and refuses a program that has changed since the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpurun.core.errors import SetupError
from gpurun.core.run_plan import Plan
from gpurun.remote.archive import Elsewhere, PackedFile, Survey, survey


def survey_run_files(plan: Plan, trainer: Path) -> Survey:
    """Return the files that a run needs on the machine. Shards that it downloads itself are listed by digest."""
    workload = plan.job.workload(plan, trainer, cpus=1)
    here = survey(workload.uploads, workload.allowed)
    public = tuple(PackedFile(f"data/{file.name}", file.bytes, Elsewhere(file.sha256)) for file in plan.data.public)
    return replace(here, files=tuple(sorted((*here.files, *public), key=lambda file: file.name)))


def require_planned_program(plan: Plan, trainer: Path) -> None:
    """Raise SetupError if the trainer, or the run's copy of the command's folder, differs from the plan.

    The receipt names the program's digest from the plan, so no other program must be uploaded.
    """
    if plan.job.digest(plan, trainer) == plan.bundle_sha256:
        return
    program = plan.job.program(plan, trainer)
    code = "trainer.altered" if program == trainer else "folder.altered"
    hint = "Start a new run with the program you want. (An upgrade of gpurun changes the official trainer.)"
    raise SetupError(code, f"{program} has changed since {plan.run} was planned.", hint=hint)
