"""Plans `gpurun run --from RUN`: a command that continues from the newest checkpoint of an earlier run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from gpurun.core.artifact_names import raw_name
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.errors import UsageError
from gpurun.core.paths import Home
from gpurun.core.run_plan import Earlier, Request
from gpurun.jobs.earlier_run import find_earlier_run, on_the_same_place

_FOLDER = "outputs/"


def command_as_before(request: Request, home: Home, usual: tuple[str, ...]) -> Request:
    """Return the request; a missing command, GPU or machine is taken from the earlier run."""
    run = find_earlier_run(request.continues, home)
    before = run.request()
    if before is None or before.command is None:
        hint = f"To continue a recipe, use gpurun train --from {run.name}."
        raise UsageError("continue.no_command", f"{run.name} did not run a command.", hint=hint)
    filled: dict[str, Any] = {
        "continues": run.name,
        "command": _with_defaults_from(request.command, before.command),
        "gpu": request.gpu or before.gpu,
        "data": request.data or before.data,
        **on_the_same_place(request, before, usual),
    }
    # A rehearsal runs on this computer, where the other machine's image and set-up do not apply.
    choices = request.choices if request.dry_run else filled.get("choices", request.choices)
    filled["choices"] = choices.with_limits_of(before.choices)
    return request.model_copy(update=filled)


def repeated_run(request: Request, home: Home) -> str:
    """Return the earlier run's name if that run succeeded and this request repeats its command unchanged; else ""."""
    if not request.continues:
        return ""
    run = find_earlier_run(request.continues, home)
    before = run.request()
    if run.receipt["training"]["outcome"] != "done" or before is None or before.command is None:
        return ""
    command = _with_defaults_from(request.command, before.command)
    is_same = (command.argv, command.env) == (before.command.argv, before.command.env)
    return run.name if is_same and request.data in (None, before.data) else ""


def _with_defaults_from(typed: Command | None, before: Command) -> Command:
    """Return the typed command; each field that still has its default gets the earlier command's value."""
    if typed is None:
        return before
    usual = Command(argv=(), outputs=EVERYTHING)
    names = [name for name in Command.model_fields if name not in ("argv", "folder")]
    same = {name: getattr(before, name) for name in names if getattr(typed, name) == getattr(usual, name)}
    return typed.model_copy(update=same)


def with_checkpoint(command: Command, request: Request, home: Home, work: Path) -> tuple[Command, Earlier | None]:
    """Copy the earlier run's checkpoint to its old path below `work`, and return the command that continues from it.

    Also return the plan's record of the earlier run. Without --from, return the command unchanged and None. Raise
    UsageError if the earlier run has no checkpoint, and VerificationFailed if a file of the checkpoint differs from the
    receipt.
    """
    if not request.continues:
        return command, None
    run = find_earlier_run(request.continues, home)
    latest, plan = run.receipt["checkpoint"]["latest"], run.plan()
    files = [file for file in run.files("checkpoint") if file["step"] == latest]
    if not files or plan is None:
        hint = "A run can be continued only if it was started with --checkpoint-glob, which names its checkpoint files."
        raise UsageError("continue.no_checkpoint", f"{run.name} has no downloaded checkpoint.", hint=hint)
    names = []
    for file in files:
        names.append(os.fsdecode(raw_name(str(file["name"]))).removeprefix(_FOLDER))
        target = work / names[-1]
        source = run.unchanged(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    resumed = names[0] if len(names) == 1 else os.path.commonpath(names)
    return command.model_copy(update={"resumed": resumed}), run.continued_at(int(latest), files, plan)
