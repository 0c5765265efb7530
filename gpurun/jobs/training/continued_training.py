"""Plans `gpurun train --from RUN`: a run that continues from the newest downloaded checkpoint of an earlier run.

The new run trains the remaining steps with the same recipe, shards, order, weights and optimiser state, on any machine.
It uploads only checkpoint files that the earlier run's signed receipt names. What the trainer would refuse on paid time
is refused before anything is rented.
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
    """Return the request; missing choices are taken from the run that it continues.

    The cap and the user's consents are never copied. If no provider is named, the provider, image and set-up are those
    of the earlier run; if that run named no provider, `usual`. Raise UsageError if there is no such run, or nothing to
    continue.
    """
    run = find_earlier_training(request.continues, home)
    plan = run.plan()
    if plan is None:
        raise run.altered("its plan")
    if not plan.job.terms.has_model:
        what = f"{run.name} ran your own command."
        raise UsageError("continue.command", what, hint=f"gpurun run --from {run.name}")
    before = run.request() or Request(recipe=plan.job.recipe, providers=(plan.offer.provider,), choices=plan.choices)
    if plan.mode is Mode.REHEARSAL:
        hint = f"The whole run: gpurun train {before.recipe_word}"
        what = f"{run.name} was a rehearsal, which cannot be continued."
        raise UsageError("continue.rehearsal", what, hint=hint)
    if request.recipe and Path(request.recipe).stem != Path(before.recipe).stem:  # The file may have been moved.
        raise UsageError(
            "continue.other_recipe",
            f"{run.name} trained {before.recipe}, not {request.recipe}.",
            hint=f"Leave the recipe out: gpurun train --from {run.name}. To start a new run from its weights: "
            f"train.init_from, see {page('FORMATS.md')}",
        )
    filled: dict[str, Any] = {
        "continues": run.name,
        "recipe": request.recipe or _earlier_recipe(run, before),
        "overrides": (*before.overrides, *request.overrides),
        "data": request.data or _earlier_shards(run, plan, before),
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
    """Return the recipe with a record of the checkpoint that it continues from. The checkpoint is read later.

    Raise UsageError if the checkpoint belongs to another recipe, or already has all steps.
    """
    run = find_earlier_training(request.continues, home)
    name, plan = run.name, run.plan()
    if plan is None:
        raise run.altered("its plan")
    changed = differing_keys(plan.job.resolved, resolved.record)
    if changed:
        raise UsageError(
            "continue.changed",
            f"{name} was trained with other values of {', '.join(changed)}, which must stay the same.",
            hint=f"{_restore_hint(plan.job.resolved, changed)} a new run: gpurun train {request.recipe_word}",
        )
    files = _newest_checkpoint(run)
    step = int(files[0]["step"])
    if step >= resolved.tables.train.steps:
        raise UsageError(
            "continue.finished",
            f"{name} has already trained all its {step:,} steps.",
            hint=f"Train more steps: gpurun train --from {name} --set train.steps={2 * step}. "
            f"To start a new run from its weights: train.init_from, see {page('FORMATS.md')}",
        )
    return replace(resolved, earlier=run.continued_at(step, files, plan))


def with_checkpoint_beside(data: DataSummary, resolved: ResolvedRecipe, home: Home, into: Path) -> DataSummary:
    """Check the checkpoint against the receipt, link it into `into`, and return the data with its size added.

    Raise UsageError if the earlier run trained on other shards, and VerificationFailed if the checkpoint was altered.
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
        _link_or_copy(source, target)
    manifest = {"v": 1, "latest": earlier.step, "best": None, "files": files}
    write_atomic(place / "MANIFEST.json", json.dumps(manifest, indent=1).encode() + b"\n")
    return data.model_copy(update={"bytes": data.bytes + earlier.bytes})


def earlier_bucket_note(earlier: Earlier, home: Home) -> Iterator[str]:
    """Yield a note if the continued run used a bucket, which may still contain the shards."""
    if url := read_plan(home.run(earlier.run)).choices.stage:
        yield f"{earlier.run} used {url}: with --stage {shlex.quote(url)}, data still there is not uploaded again."


def longer_schedule_note(earlier: Earlier, steps: int) -> Iterator[str]:
    """Yield a note if more steps are planned than before, because that changes the learning-rate schedule."""
    if steps > earlier.steps > 0:
        yield (
            f"{earlier.run} was planned for {earlier.steps:,} steps, this run for {steps:,}: from step "
            f"{earlier.step:,} on, the learning rate follows the longer schedule."
        )


def other_runs_from(earlier: Earlier, home: Home) -> Iterator[str]:
    """Yield a note for each other run that continued the same run, because the same steps would be paid for twice."""
    for name in planned_runs(home):
        try:
            if earlier.run.encode() not in read_regular(home.run(name).plan):
                continue  # Only the few plans that can match are parsed.
            before = read_plan(home.run(name)).continues
            sight = look_at_run(home, name) if before and before.run == earlier.run else None
        except (GpurunError, OSError, ValidationError):
            continue
        if sight is None:
            continue
        if sight.unfinished:
            yield f"{name} is already continuing from {earlier.run}, and has not ended: gpurun attach {name}."
            continue
        events = (record.typed for record in sight.records)
        home_files = [file for record in events if isinstance(record, FilesBrought) for file in record.files]
        step = max((file["step"] for file in home_files if file["kind"] == "weights"), default=0)
        if step > earlier.step:
            yield f"{name} has already continued from {earlier.run}, to step {step:,}: gpurun train --from {name}."


def _restore_hint(before: Mapping[str, Any], changed: list[str]) -> str:
    """Return the beginning of a hint that ends in "a new run". It names the flags that restore the recipe's values.

    A key that the earlier recipe lacked cannot be removed with a flag. If there are only such keys, no flags are named.
    """
    flags = []
    for key in changed:
        table, name = key.split(".", 1)
        value = before.get(table, {}).get(name)
        if value is not None:
            flags.append(f"--set {shlex.quote(f'{key}={json.dumps(value)}')}")
    return f"Restore them: {' '.join(flags)}. Or start" if flags else "Start"


def _newest_checkpoint(run: EarlierRun) -> list[dict[str, Any]]:
    """Return the three files of the newest checkpoint that was downloaded completely; else raise UsageError."""
    files = run.files(*_KINDS)
    step = newest_whole(files)
    if step is None:
        before, request = run.receipt["asked"].get("continues"), run.request()
        again = f". Or start again: gpurun train {request.recipe_word}" if request else ""
        hint = f"Is it in the bucket? gpurun collect {run.name}{again}"
        if before:
            hint = f"{run.name} continued from {before['run']}, so you can use: gpurun train --from {before['run']}"
        raise UsageError("continue.no_checkpoint", f"{run.name} has no complete checkpoint downloaded.", hint=hint)
    return [file for file in files if file["step"] == step]


def newest_whole(files: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the step of the newest checkpoint that has all three files in a receipt's `files`, or None."""
    steps = Counter(file["step"] for file in files if file["kind"] in _KINDS)
    return max((step for step, count in steps.items() if count == len(_KINDS)), default=None)


def _earlier_recipe(run: EarlierRun, before: Request) -> str:
    """Return the earlier run's recipe, a name or a path. Raise UsageError if it was a file that no longer exists."""
    name = Path(before.recipe)
    if name.stem != before.recipe and not name.expanduser().is_file():
        raise UsageError(
            "continue.no_recipe",
            f"{run.name} trained the recipe {before.recipe}, which does not exist any more.",
            hint=f"If it was moved, give its path: gpurun train FOLDER/{name.name} --from {run.name}",
        )
    return before.recipe


def _earlier_shards(run: EarlierRun, plan: Plan, before: Request) -> str | None:
    """Return the folder of the shards that a run trained on, if it still exists; else the run's --data, or None.

    For public shards, return their name at the hub.
    """
    if plan.data.public:
        return plan.data.source if plan.data.source.startswith(HUB) else before.data
    there = run.folder.now_at(plan.data.folder)
    # isfile is False, without an error, for another user's folder.
    if os.path.isfile(os.path.join(there, "data.json")):
        return there
    return None if before.data == plan.data.folder else before.data


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the target is on another disk. An existing target is removed first."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
