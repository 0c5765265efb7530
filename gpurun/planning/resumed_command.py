"""`gpurun run --from RUN`: a command goes on from the newest checkpoint that an earlier run brought home."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from gpurun.core.artifact_names import path_of, raw_name
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.errors import UsageError, VerificationFailed
from gpurun.core.money import Micros
from gpurun.core.paths import Home
from gpurun.core.run_plan import Earlier, Request
from gpurun.planning.continue_from import earlier_run

_FOLDER = "outputs/"


def as_before(request: Request, home: Home, usual: tuple[str, ...]) -> Request:
    """The request with what the earlier run was asked, where nothing else is said: command, GPU, machine."""
    run = earlier_run(request.continues, home)
    asked = run.request()
    if asked is None or asked.command is None:
        hint = f"gpurun train --from {run.folder.name} goes on with a recipe."
        raise UsageError("continue.no_command", f"{run.folder.name} did not run a command.", hint=hint)
    told: dict[str, Any] = {"continues": run.folder.name, "command": _filled(request.command, asked.command)}
    told["gpu"], told["data"] = request.gpu or asked.gpu, request.data or asked.data
    if not request.providers:
        told["providers"] = asked.providers or usual
        own = ("host", "host_key", "identity", "jump", "python", "price_micros_per_hour")
        told |= {name: getattr(request, name) or getattr(asked, name) for name in own}
        outfit_names = ("image", "setup", "setup_limit_s", "pass_env")
        names = () if request.dry_run else outfit_names  # Nothing is installed on this machine.
        outfit = {name: getattr(request.choices, name) or getattr(asked.choices, name) for name in names}
        told["choices"] = request.choices.model_copy(update=outfit)
    told["choices"] = told.get("choices", request.choices).with_limits_of(asked.choices)
    return request.model_copy(update=told)


def _filled(typed: Command | None, before: Command) -> Command:
    """The command as it was typed, with what the earlier one was told where nothing else is said."""
    if typed is None:
        return before
    usual = Command(argv=(), outputs=EVERYTHING)
    names = [name for name in Command.model_fields if name not in ("argv", "folder")]
    same = {name: getattr(before, name) for name in names if getattr(typed, name) == getattr(usual, name)}
    return typed.model_copy(update=same)


def goes_on(command: Command, request: Request, home: Home, work: Path) -> tuple[Command, Earlier | None]:
    """The command with its checkpoint in `work`, where it lay when it was written; itself where none is wanted.

    UsageError where the run brought none home, VerificationFailed for one that was altered since.
    """
    if not request.continues:
        return command, None
    run = earlier_run(request.continues, home)
    name, told, plan = run.folder.name, run.told["checkpoint"], run.plan()
    files = [one for one in run.files("checkpoint") if one["step"] == told["latest"]]
    if not files or plan is None:
        hint = "Say which files are checkpoints (--checkpoint-glob) from the first run on."
        raise UsageError("continue.no_checkpoint", f"{name} brought no checkpoint of a command home.", hint=hint)
    names = {str(file["name"]): os.fsdecode(raw_name(str(file["name"]))).removeprefix(_FOLDER) for file in files}
    for file in files:
        if not run.holds(file):
            what = f"{file['name']} of {name} is not there any more as its receipt has it."
            raise VerificationFailed("continue.altered", what, hint=f"gpurun audit {name} says what changed.")
        target = work / names[str(file["name"])]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path_of(run.folder.artifacts, str(file["name"])), target)
    spent = run.told["cost"]["upper_bound_micros"]
    before = plan.continues.spent_micros if plan.continues else Micros(0)
    earlier = Earlier(
        run=name,
        step=int(told["latest"]),
        bytes=sum(int(file["bytes"]) for file in files),
        receipt_sha256=run.receipt_sha256,
        spent_micros=None if spent is None or before is None else Micros(spent + before),
        steps=plan.job.steps,
    )
    resumed = next(iter(names.values())) if len(names) == 1 else os.path.commonpath([*names.values()])
    return command.model_copy(update={"resumed": resumed}), earlier
