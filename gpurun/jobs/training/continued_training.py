"""`gpurun train --from RUN`: a run continues from the newest checkpoint downloaded by an earlier run.

The next run trains the steps that are left, with the same recipe, shards, order, weights and optimiser state, on any
machine. It uploads only files named in the earlier run's signed receipt, and everything that the trainer would refuse
on paid time is refused here.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpurun.core.errors import GpurunError, UsageError
from gpurun.core.installed_files import page
from gpurun.core.journal_events import FilesBrought
from gpurun.core.paths import Home, make_private, read_regular, write_atomic
from gpurun.core.run_plan import DataSummary, Earlier, Mode, Plan, Request
from gpurun.data.source_names import HUB
from gpurun.jobs.earlier_run import EarlierRun, on_the_same_place
from gpurun.jobs.earlier_sweep import find_earlier_training
from gpurun.jobs.trainer import CONTINUED
from gpurun.jobs.training.recipe import ResolvedRecipe, differing_keys
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.ledger.runs import look_at_run, planned_runs

_KINDS = ("weights", "optimizer", "state")


def training_as_before(request: Request, home: Home, usual: tuple[str, ...] = ()) -> Request:
    """Return the request, with each choice that the user left open taken from the run that it continues.

    The cap and consents are never taken over. Without a named provider, the place, image and set-up stay the same
    (`usual` if the earlier run named no place). UsageError if there is no such run, or nothing to continue.
    """
    run = find_earlier_training(request.continues, home)
    plan = run.plan()
    if plan is None:
        raise run.altered("The plan")
    if not plan.job.terms.has_model:
        what = f"{run.name} ran a command of your own."
        raise UsageError("continue.command", what, hint=f"gpurun run --from {run.name}")
    before = run.request() or Request(recipe=plan.job.recipe, providers=(plan.offer.provider,), choices=plan.choices)
    if plan.mode is Mode.REHEARSAL:
        hint = f"The whole run: gpurun train {before.recipe_word}"
        what = f"{run.name} was a rehearsal, which cannot be continued."
        raise UsageError("continue.rehearsal", what, hint=hint)
    if request.recipe and Path(request.recipe).stem != Path(before.recipe).stem:  # A file may lie elsewhere now.
        raise UsageError(
            "continue.other_recipe",
            f"{run.name} trained {before.recipe}, not {request.recipe}.",
            hint=f"Leave the recipe out: gpurun train --from {run.name}. To start another run from its weights: "
            f"train.init_from, see {page('FORMATS.md')}",
        )
    filled: dict[str, Any] = {
        "continues": run.name,
        "recipe": request.recipe or _recipe_of(run, before),
        "overrides": (*before.overrides, *request.overrides),
        "data": request.data or _shards_of(run, plan, before),
        "gpu": request.gpu or before.gpu,
        **on_the_same_place(request, before, usual),
    }
    choices = filled.get("choices", request.choices).with_limits_of(before.choices)
    update = {"core_bundle": request.choices.core_bundle or before.choices.core_bundle}
    if before.choices.trainer and not request.choices.trainer:
        update["trainer"] = str(run.folder.trainer)
    filled["choices"] = choices.model_copy(update=update)
    return request.model_copy(update=filled)


def with_earlier_checkpoint(resolved: ResolvedRecipe, request: Request, home: Home) -> ResolvedRecipe:
    """Return the recipe with a record of the checkpoint that it continues from, which is not read yet.

    UsageError if the checkpoint belongs to another recipe, or has all steps already.
    """
    run = find_earlier_training(request.continues, home)
    name, plan = run.name, run.plan()
    if plan is None:
        raise run.altered("The plan")
    changed = differing_keys(plan.job.resolved, resolved.record)
    if changed:
        raise UsageError(
            "continue.changed",
            f"{name} was trained with other values of {', '.join(changed)}, which must not change within a training.",
            hint=f"{_set_back(plan.job.resolved, changed)} a new run: gpurun train {request.recipe_word}",
        )
    files = _newest(run)
    step = int(files[0]["step"])
    if step >= resolved.tables.train.steps:
        raise UsageError(
            "continue.finished",
            f"{name} has taken all its {step:,} steps.",
            hint=f"Train more steps: gpurun train --from {name} --set train.steps={2 * step}. "
            f"A new run from its weights: train.init_from, see {page('FORMATS.md')}",
        )
    return replace(resolved, earlier=run.continued_at(step, files, plan))


def with_checkpoint_beside(data: DataSummary, resolved: ResolvedRecipe, home: Home, into: Path) -> DataSummary:
    """Check the checkpoint against the receipt, link it into `into`, and return the data with its size added.

    UsageError if the run trained on other shards; VerificationFailed if the checkpoint has changed.
    """
    earlier = resolved.earlier
    if earlier is None:
        return data
    run = find_earlier_training(earlier.run, home)
    plan, files = run.plan(), [file for file in run.files(*_KINDS) if file["step"] == earlier.step]
    if plan is None or plan.data.sha256 != data.sha256:
        where = shlex.quote(plan.data.folder) if plan and os.path.isdir(plan.data.folder) else ""
        raise UsageError(
            "continue.other_data",
            f"{earlier.run} trained on other shards.",
            hint=f"Name its shards with --data{f' {where}' if where else ''}",
        )
    place = into / CONTINUED
    for file in files:
        source, target = run.unchanged(file), place / str(file["name"])
        make_private(target.parent)
        _link(source, target)
    manifest = {"v": 1, "latest": earlier.step, "best": None, "files": files}
    write_atomic(place / "MANIFEST.json", json.dumps(manifest, indent=1).encode() + b"\n")
    return data.model_copy(update={"bytes": data.bytes + earlier.bytes})


def earlier_bucket_note(earlier: Earlier, home: Home) -> Iterator[str]:
    """Yield a note if the run that this plan continues used a bucket, which may still hold the shards."""
    if url := read_plan(home.run(earlier.run)).choices.stage:
        yield f"{earlier.run} used {url}: with --stage {shlex.quote(url)}, data that is still there is not sent again."


def longer_schedule_note(earlier: Earlier, steps: int) -> Iterator[str]:
    """Yield a note if more steps are planned than before, because the learning rate follows the longer schedule."""
    if steps > earlier.steps > 0:
        yield (
            f"{earlier.run} was planned for {earlier.steps:,} steps, this run for {steps:,}: from step "
            f"{earlier.step:,} on, the learning rate follows the longer schedule."
        )


def other_runs_from(earlier: Earlier, home: Home) -> Iterator[str]:
    """Yield a note for each other run that continued the same one, because its steps would be paid for twice."""
    for name in planned_runs(home):
        try:
            if earlier.run.encode() not in read_regular(home.run(name).plan):
                continue  # Parse only the few plans that can match.
            before = read_plan(home.run(name)).continues
            sight = look_at_run(home, name) if before and before.run == earlier.run else None
        except (GpurunError, OSError, ValidationError):
            continue
        if sight is None:
            continue
        if sight.unfinished:
            yield f"{name} goes on from {earlier.run} too, and is not over: gpurun attach {name}."
            continue
        brought = (record.typed for record in sight.records)
        home_files = [file for record in brought if isinstance(record, FilesBrought) for file in record.files]
        step = max((file["step"] for file in home_files if file["kind"] == "weights"), default=0)
        if step > earlier.step:
            yield f"{name} went on from {earlier.run} before, to step {step:,}: gpurun train --from {name}."


def _set_back(before: Mapping[str, Any], changed: list[str]) -> str:
    """Return how to have a recipe's values again, up to the words "a new run"; a flag cannot take a key away."""
    flags = []
    for key in changed:
        table, name = key.split(".", 1)
        value = before.get(table, {}).get(name)
        if value is not None:
            flags.append(f"--set {shlex.quote(f'{key}={json.dumps(value)}')}")
    return f"As they were: {' '.join(flags)}. Or begin" if flags else "Begin"


def _newest(run: EarlierRun) -> list[dict[str, Any]]:
    """Return the three files of the newest checkpoint that came home whole."""
    files = run.files(*_KINDS)
    step = newest_whole(files)
    if step is None:
        before, request = run.receipt["asked"].get("continues"), run.request()
        again = f". Or begin again: gpurun train {request.recipe_word}" if request else ""
        hint = f"Is it in the bucket? gpurun collect {run.name}{again}"
        if before:
            hint = f"It went on from {before['run']} itself: gpurun train --from {before['run']}"
        raise UsageError("continue.no_checkpoint", f"{run.name} brought no whole checkpoint home.", hint=hint)
    return [file for file in files if file["step"] == step]


def newest_whole(files: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the step of the newest checkpoint of which all three files came home; `files` as a receipt has them."""
    steps = Counter(file["step"] for file in files if file["kind"] in _KINDS)
    return max((step for step, count in steps.items() if count == len(_KINDS)), default=None)


def _recipe_of(run: EarlierRun, before: Request) -> str:
    """Return the recipe that a run was asked for; UsageError where it was a file that is not there now."""
    name = Path(before.recipe)
    if name.stem != before.recipe and not name.expanduser().is_file():
        raise UsageError(
            "continue.no_recipe",
            f"{run.name} trained the recipe {before.recipe}, which is not here.",
            hint=f"Say where it is: gpurun train FOLDER/{name.name} --from {run.name}",
        )
    return before.recipe


def _shards_of(run: EarlierRun, plan: Plan, before: Request) -> str | None:
    """Return the folder of the shards that a run trained on if it still exists, else its --data if that differs."""
    if plan.data.public:
        return plan.data.source if plan.data.source.startswith(HUB) else before.data
    there = run.folder.now_at(plan.data.folder)
    if os.path.isfile(os.path.join(there, "data.json")):  # False, without an error, for another user's folder.
        return there
    return None if before.data == plan.data.folder else before.data


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it to another disk; an existing target, which may be a link, is removed first."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
