"""`gpurun train --from RUN`: a run continues from the newest checkpoint that an earlier run brought home.

The next run trains what the earlier one did not come to: same recipe, same shards, same order, weights and optimiser
as they were, on whatever machine is rented now. What is sent along is what the earlier run's signed receipt names, and
everything that would make the trainer refuse it on paid time is refused here.
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
    """Return the request with what the run that it continues was asked, wherever nothing else is asked now.

    The cap is not among it, nor is any consent. Where no provider is named, it is the same place, with the same image
    and set-up; `usual`, if it could be anywhere. UsageError when there is no such run, or nothing to continue.
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
        raise UsageError("continue.rehearsal", f"{run.name} was a rehearsal; there is nothing to go on from.",
                         hint=hint)  # fmt: skip
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
    """Return the recipe with the checkpoint that it continues from; nothing of that is read yet.

    UsageError when the checkpoint is of another recipe, or has taken all steps.
    """
    run = find_earlier_training(request.continues, home)
    name, plan = run.name, run.plan()
    if plan is None:
        raise run.altered("The plan")
    changed = differing_keys(plan.job.resolved, resolved.record)
    if changed:
        raise UsageError(
            "continue.changed",
            f"{name} was trained with other values of {', '.join(changed)}; to go on is to train the same.",
            hint=f"{_set_back(plan.job.resolved, changed)} a new run: gpurun train {request.recipe_word}",
        )
    files = _newest(run)
    step = int(files[0]["step"])
    if step >= resolved.tables.train.steps:
        raise UsageError(
            "continue.finished",
            f"{name} has taken all its {step:,} steps.",
            hint=f"Take more: gpurun train --from {name} --set train.steps={2 * step}. A new run from its weights: "
            f"train.init_from, see {page('FORMATS.md')}",
        )
    return replace(resolved, earlier=run.continued_at(step, files, plan))


def with_checkpoint_beside(data: DataSummary, resolved: ResolvedRecipe, home: Home, into: Path) -> DataSummary:
    """Return the data with the checkpoint beside it in `into`, found to be what the receipt says; it is shipped, too.

    UsageError for other shards than those the run trained on; VerificationFailed for a checkpoint that was altered.
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
            f"{earlier.run} trained on other shards than these.",
            hint=f"Give shards with --data{f' {where}' if where else ''}",
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
    """Yield what a plan without a bucket says where the run that it continues had one: shards may still be there."""
    if url := read_plan(home.run(earlier.run)).choices.stage:
        yield f"{earlier.run} went by {url}: with --stage {shlex.quote(url)} what is still there is not sent again."


def longer_schedule_note(earlier: Earlier, steps: int) -> Iterator[str]:
    """Yield what the plan says of more steps than were planned: the learning rate follows the longer schedule."""
    if steps > earlier.steps > 0:
        yield (
            f"{earlier.run} was planned for {earlier.steps:,} steps, this run is for {steps:,}: from step "
            f"{earlier.step:,} on the learning rate is that of the longer run."
        )


def other_runs_from(earlier: Earlier, home: Home) -> Iterator[str]:
    """Yield what the plan says of other runs that continued the same one: their steps would be paid for twice."""
    for name in planned_runs(home):
        try:
            if earlier.run.encode() not in read_regular(home.run(name).plan):
                continue  # Of ten thousand plans few are taken apart.
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
    """Return the shards that a run trained on, where they are still there; else its --data, if that is another."""
    if plan.data.public:
        return plan.data.source if plan.data.source.startswith(HUB) else before.data
    there = run.folder.now_at(plan.data.folder)
    if os.path.isfile(os.path.join(there, "data.json")):  # Of another user's folder it says no, and raises nothing.
        return there
    return None if before.data == plan.data.folder else before.data


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; on another disk it is copied. What is there may be a link, and goes first."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
