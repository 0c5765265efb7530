"""`gpurun run --from RUN`: a command continues from the newest checkpoint that an earlier run brought home."""

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
    """Return the request with what the earlier run was asked, where nothing else is said: command, GPU, machine."""
    run = find_earlier_run(request.continues, home)
    before = run.request()
    if before is None or before.command is None:
        hint = f"gpurun train --from {run.name} goes on with a recipe."
        raise UsageError("continue.no_command", f"{run.name} did not run a command.", hint=hint)
    filled: dict[str, Any] = {
        "continues": run.name,
        "command": _filled(request.command, before.command),
        "gpu": request.gpu or before.gpu,
        "data": request.data or before.data,
        **on_the_same_place(request, before, usual),
    }
    # A rehearsal is here, where nothing of the other machine's outfit is installed.
    choices = request.choices if request.dry_run else filled.get("choices", request.choices)
    filled["choices"] = choices.with_limits_of(before.choices)
    return request.model_copy(update=filled)


def repeated_run(request: Request, home: Home) -> str:
    """Return the earlier run that ended well and whose command would run once more unchanged; "" where none is."""
    if not request.continues:
        return ""
    run = find_earlier_run(request.continues, home)
    before = run.request()
    if run.receipt["training"]["outcome"] != "done" or before is None or before.command is None:
        return ""
    command = _filled(request.command, before.command)
    is_same = (command.argv, command.env) == (before.command.argv, before.command.env)
    return run.name if is_same and request.data in (None, before.data) else ""


def _filled(typed: Command | None, before: Command) -> Command:
    """Return the command as it was typed, with what the earlier one was told where nothing else is said."""
    if typed is None:
        return before
    usual = Command(argv=(), outputs=EVERYTHING)
    names = [name for name in Command.model_fields if name not in ("argv", "folder")]
    same = {name: getattr(before, name) for name in names if getattr(typed, name) == getattr(usual, name)}
    return typed.model_copy(update=same)


def with_checkpoint(command: Command, request: Request, home: Home, work: Path) -> tuple[Command, Earlier | None]:
    """Return the command with its checkpoint in `work`, where it lay when it was written; itself without --from.

    UsageError where the run brought none home, VerificationFailed for one that was altered since.
    """
    if not request.continues:
        return command, None
    run = find_earlier_run(request.continues, home)
    latest, plan = run.receipt["checkpoint"]["latest"], run.plan()
    files = [file for file in run.files("checkpoint") if file["step"] == latest]
    if not files or plan is None:
        hint = "Say which files are checkpoints (--checkpoint-glob) from the first run on."
        raise UsageError("continue.no_checkpoint", f"{run.name} brought no checkpoint of a command home.", hint=hint)
    names = []
    for file in files:
        names.append(os.fsdecode(raw_name(str(file["name"]))).removeprefix(_FOLDER))
        target = work / names[-1]
        source = run.unchanged(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    resumed = names[0] if len(names) == 1 else os.path.commonpath(names)
    return command.model_copy(update={"resumed": resumed}), run.continued_at(int(latest), files, plan)
