"""Plans `gpurun dev --from RUN`: a dev box that starts with the folder that an earlier dev box had when it ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpurun.core.artifact_names import raw_name
from gpurun.core.command import EVERYTHING, Command
from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import Home
from gpurun.core.run_plan import Earlier, Request
from gpurun.core.trainer_events import events_of
from gpurun.jobs.dev_box import SYNC_S, DevBoxJob
from gpurun.jobs.earlier_run import EarlierRun, find_earlier_run, on_the_same_place

_FOLDER = "outputs/"
_LISTS, _SIZES = ("include", "exclude", "pip"), ("output_bytes", "disk_gb")


def dev_box_as_before(
    request: Request, wishes: dict[str, Any], home: Home, usual: tuple[str, ...]
) -> tuple[Request, dict[str, Any]]:
    """Return the request and the job's own fields. What the user did not type is taken from the earlier box."""
    run = find_earlier_run(request.continues, home)
    before, job = run.request(), _dev_box_job_of(run)
    if before is None or before.command is None or request.command is None:
        raise run.altered("its request")
    typed, earlier = request.command, before.command
    command: dict[str, Any] = {name: getattr(typed, name) or getattr(earlier, name) for name in _LISTS}
    command |= {name: max(getattr(typed, name), getattr(earlier, name)) for name in _SIZES}
    command["outputs"] = earlier.outputs if typed.outputs == EVERYTHING else typed.outputs
    filled: dict[str, Any] = {
        "continues": run.name,
        "command": typed.model_copy(update={**command, "folder": ""}),
        "gpu": request.gpu or before.gpu,
        "data": request.data or before.data,
        **on_the_same_place(request, before, usual),
    }
    choices = filled.get("choices", request.choices)
    filled["choices"] = choices.with_limits_of(before.choices)
    return request.model_copy(update=filled), {
        "git": job.git,
        "at_commit": _commit_of(run) if job.git else "",
        "jupyter": wishes["jupyter"] or job.jupyter,
        "sync_s": job.sync_s if wishes["sync_s"] == SYNC_S else wishes["sync_s"],
    }


def with_last_folder(command: Command, request: Request, home: Home, work: Path) -> tuple[Command, Earlier]:
    """Rebuild the earlier box's folder in `work`: copy the files that were uploaded, then those that were downloaded.

    Return the command with the earlier box's executable files and commit, and the plan's record of the earlier run.
    Raise VerificationFailed if a file differs from the receipt.
    """
    run = find_earlier_run(request.continues, home)
    plan, job = run.plan(), _dev_box_job_of(run)
    if plan is None:
        raise run.altered("its plan")
    uploaded = job.program(plan, bundle_root())
    if not uploaded.is_dir() or job.digest(plan, bundle_root()) != plan.bundle_sha256:
        raise run.altered("its uploaded folder")
    shutil.copytree(uploaded, work, dirs_exist_ok=True)
    for name in _files_removed_there(run):
        if (work / name).is_file():  # The machine reported this name, and it may be the name of a folder.
            (work / name).unlink()
    files = [file for file in run.files("output", "checkpoint") if str(file["name"]).startswith(_FOLDER)]
    for file in files:
        target = work / os.fsdecode(raw_name(str(file["name"]))).removeprefix(_FOLDER)
        source = run.unchanged(file)
        _clear_path_to(work, target)
        shutil.copyfile(source, target)
    same = {"executable": job.command.executable, "commit": job.command.commit}
    return command.model_copy(update=same), run.continued_at(0, files, plan)


def _files_removed_there(run: EarlierRun) -> Iterator[str]:
    """Yield the uploaded files that were removed on the earlier box, according to its events."""
    for event in events_of(run.folder.events):
        names = event.said.get("names") if event.kind == "removed" else None
        for name in names if isinstance(names, list) else ():
            with suppress(ValueError):
                yield os.fsdecode(raw_name(str(name))).removeprefix(_FOLDER)


def _clear_path_to(work: Path, target: Path) -> None:
    """Make the folders above `target`. Remove a file where a folder must be, and a folder at `target` itself."""
    for parent in [parent for parent in reversed(target.parents) if work in parent.parents]:
        if parent.is_file():
            parent.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        shutil.rmtree(target)


def _dev_box_job_of(run: EarlierRun) -> DevBoxJob:
    """Return the job of an earlier dev box. Raise UsageError for another kind of run."""
    plan = run.plan()
    if plan is None:
        raise run.altered("its plan")
    if not isinstance(plan.job, DevBoxJob):
        hint = f"gpurun {plan.job.terms.verb} --from {run.name} continues it. A box with its files: --upload DIR."
        raise UsageError("dev.not_a_box", f"{run.name} was not a dev box.", hint=hint)
    return plan.job


def _commit_of(run: EarlierRun) -> str:
    """Return the commit that the earlier box cloned, according to its events; "" if they name none."""
    for event in events_of(run.folder.events):
        if event.kind == "clone":
            commit = str(event.said.get("commit", ""))
            return commit if len(commit) in (40, 64) and set(commit) <= set("0123456789abcdef") else ""
    return ""
