"""Plans what continues a sweep: a new sweep for its remaining trials, or a training run from its best trial."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.artifact_names import raw_name
from gpurun.core.errors import UsageError
from gpurun.core.paths import Home, make_private
from gpurun.core.run_plan import Earlier, Plan, Request
from gpurun.core.sweep import Sweep
from gpurun.core.untrusted import Malformed, parse_object
from gpurun.jobs.earlier_run import EarlierRun, find_earlier_run, on_the_same_place
from gpurun.jobs.sweep import FOLDER, TABLE, SweepJob

_SWEEP_FOLDER = f"outputs/{FOLDER}/"
"""The subfolder of the downloads that holds a sweep's files."""
_MOST_CHARS = 200


def sweep_as_before(request: Request, home: Home, usual: tuple[str, ...]) -> Request:
    """Return the request of a sweep that continues an earlier one, whose request fills the missing fields."""
    run = find_earlier_run(request.continues, home)
    before = run.request()
    if before is None or before.sweep is None:
        what = f"{run.name} was not a sweep."
        raise UsageError("continue.no_sweep", what, hint=f"If it is unfinished: gpurun resume {run.name}")
    if request.command or request.recipe or request.sweep:
        raise make_other_sweep(run.name, "a command" if request.command else request.recipe or "a setting")
    same = before.model_dump(include={"recipe", "overrides"})
    filled: dict[str, Any] = {
        **same,
        "continues": run.name,
        "command": before.command,
        "sweep": before.sweep,
        "gpu": request.gpu or before.gpu,
        "data": request.data or before.data,
        **on_the_same_place(request, before, usual),
    }
    filled["choices"] = filled.get("choices", request.choices).with_limits_of(before.choices)
    return request.model_copy(update=filled)


def make_other_sweep(run: str, given: str) -> UsageError:
    """Return the error for a sweep that continues `run` and also has a setting of its own (`given`)."""
    what = f"A sweep with --from repeats the settings of the earlier sweep, so {given} is not allowed with it."
    hint = f"Leave it out: gpurun sweep --from {run}; or start another sweep without --from."
    return UsageError("continue.other_sweep", what, hint=hint)


def take_earlier_sweep(request: Request, sweep: Sweep, home: Home, into: Path) -> Earlier | None:
    """Copy an earlier sweep's results into the folder `into`, which is uploaded, and return the record of that sweep.

    Return None if the request does not continue a sweep. Raise VerificationFailed if a file differs from the receipt,
    and UsageError if no trial is left to run.
    """
    if not request.continues:
        return None
    run = find_earlier_run(request.continues, home)
    plan, files = run.plan(), run.files("checkpoint")
    if plan is None:
        raise run.altered("its plan")
    latest = run.receipt["checkpoint"]["latest"]
    files = [file for file in files if file["step"] == latest]
    rows = _read_table(run)["rows"]
    over = sum(row.get("state") in ("done", "pruned", "failed", "nan") for row in rows)
    if over >= sweep.trials:
        hint = f"The best trial is in {run.folder.artifacts}; gpurun receipt {run.name} lists all trials."
        if isinstance(plan.job, SweepJob) and plan.job.trial.terms.has_model:
            hint = f"To continue training the best trial: gpurun train --from {run.name} --set train.steps=N"
        raise UsageError("continue.finished", f"{run.name} has run all {sweep.trials} trials.", hint=hint)
    for file in files:
        name = os.fsdecode(raw_name(str(file["name"]))).removeprefix(_SWEEP_FOLDER)
        source, target = run.unchanged(file), into / name
        make_private(target.parent)
        shutil.copyfile(source, target)
    return run.continued_at(int(latest or 0), files, plan)


@dataclass(frozen=True)
class EarlierTrial(EarlierRun):
    """The best trial of a sweep that ended, with the interface of a stand-alone training run."""

    number: int
    params: dict[str, str]

    @property
    def _sweep_folder(self) -> str:
        return f"{_SWEEP_FOLDER}best/{self.number:03d}/"

    def plan(self) -> Plan | None:
        """Return the sweep's plan, with the trial's job in place of the sweep's."""
        plan = super().plan()
        if plan is None or not isinstance(plan.job, SweepJob):
            return plan
        return plan.model_copy(update={"job": plan.job.with_settings(self.params)})

    def request(self) -> Request | None:
        """Return the request that would train only this trial."""
        before = super().request()
        if before is None:
            return None
        sets = (*before.overrides, *(f"{name}={value}" for name, value in self.params.items()))
        return before.model_copy(update={"overrides": sets, "sweep": None, "continues": ""})

    def files(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the trial's downloaded files, as its trainer's own manifest lists them."""
        home = {str(file["name"]): file for file in super().files("checkpoint", "output")}
        listed = _read_confirmed_object(self, home.get(f"{self._sweep_folder}MANIFEST.json")).get("files")
        entries = [file for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []
        found = []
        for file in entries:
            downloaded = home.get(f"{self._sweep_folder}{file.get('name')}")
            if downloaded is None or file.get("sha256") != downloaded["sha256"]:
                continue  # It was overwritten after the manifest was written.
            if file.get("kind") in kinds and type(file.get("step")) is int:
                found.append({**file, "bytes": downloaded["bytes"]})
        return found

    def unchanged(self, file: dict[str, Any]) -> Path:
        """See `EarlierRun.unchanged`."""
        return super().unchanged({**file, "name": f"{self._sweep_folder}{file['name']}"})


def find_earlier_training(reference: str, home: Home) -> EarlierRun:
    """Return the run that `reference` names, or the best trial if it is a sweep of a recipe.

    Raise UsageError if no trial of the sweep has a result.
    """
    run = find_earlier_run(reference, home)
    plan = run.plan()
    if plan is None or not isinstance(plan.job, SweepJob) or not plan.job.trial.terms.has_model:
        return run
    table = _read_table(run)
    rows = {row["trial"]: row for row in table["rows"]}
    best = next((rows[number] for number in table["best"] if type(number) is int and number in rows), None)
    if best is None or not plan.job.sweep.space.keys() <= best["params"].keys():
        hint = f"gpurun receipt {run.name} lists all trials."
        raise UsageError("continue.no_checkpoint", f"No trial of {run.name} has a result.", hint=hint)
    params = {name: best["params"][name][:_MOST_CHARS] for name in plan.job.sweep.space}
    return EarlierTrial(run.folder, run.receipt, run.receipt_sha256, best["trial"], params)


def _read_table(run: EarlierRun) -> dict[str, Any]:
    """Return the downloaded table of a sweep's trials. Raise UsageError if there is none."""
    found = {str(file["name"]): file for file in run.files("checkpoint")}
    table = _read_confirmed_object(run, found.get(f"{_SWEEP_FOLDER}{TABLE}"))
    rows, best = table.get("rows"), table.get("best")
    if not isinstance(rows, list) or not isinstance(best, list) or not all(map(_is_row, rows)):
        hint = "It cannot be continued; start a new sweep."
        raise UsageError("continue.no_table", f"{run.name} has no usable table of trials here.", hint=hint)
    return table


def _is_row(row: Any) -> bool:
    """Return whether a row has the fields that are used. The machine wrote the row, so it may contain anything."""
    if not isinstance(row, dict) or type(row.get("trial")) is not int or row["trial"] < 1:
        return False
    params = row.get("params")
    return isinstance(params, dict) and all(isinstance(value, str) for value in params.values())


def _read_confirmed_object(run: EarlierRun, file: dict[str, Any] | None) -> dict[str, Any]:
    """Return a small JSON file as an object; {} if it is missing, differs from the receipt, or is not an object."""
    content = run.content(file) if file is not None else None
    try:
        return parse_object(content) if content else {}
    except Malformed:
        return {}
