"""Going on, in a rental of its own, from the newest checkpoint that an earlier run brought home.

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

from gpurun.core.errors import GpurunError, UsageError, VerificationFailed
from gpurun.core.installed_files import page
from gpurun.core.journal_events import FilesBrought
from gpurun.core.money import Micros
from gpurun.core.paths import Home, make_private, read_regular, write_atomic
from gpurun.core.run_plan import DataSummary, Earlier, Mode, Plan, Request
from gpurun.data.source_names import HUB
from gpurun.jobs.training.recipe import ResolvedRecipe, differing_keys
from gpurun.ledger.chain import read_chain
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.ledger.runs import find_run, look, planned_runs
from gpurun.planning.verified_run import VerifiedRun, verified_run

FOLDER = "continue"
"""Where the trainer finds the checkpoint, beside the shards."""
_KINDS = ("weights", "optimizer", "state")


def as_before(request: Request, home: Home, usual: tuple[str, ...] = ()) -> Request:
    """The request with what the run that it goes on from was asked, wherever nothing else is asked now.

    The cap is not among it, nor is any consent. Where no provider is named, it is the same place, with the same image
    and set-up; `usual`, if it could be anywhere. UsageError when there is no such run, or nothing to go on from.
    """
    run = earlier_run(request.continues, home)
    plan = run.plan()
    if plan is None:
        raise _altered(run.folder.name, "The plan")
    if not plan.job.terms.has_model:
        what = f"{run.folder.name} ran a command of your own."
        raise UsageError("continue.command", what, hint=f"gpurun run --from {run.folder.name}")
    asked = run.request() or Request(recipe=plan.job.recipe, providers=(plan.offer.provider,), choices=plan.choices)
    if plan.mode is Mode.REHEARSAL:
        hint = f"The whole run: gpurun train {asked.recipe_word}"
        raise UsageError("continue.rehearsal", f"{run.folder.name} was a rehearsal; there is nothing to go on from.",
                         hint=hint)  # fmt: skip
    if request.recipe and Path(request.recipe).stem != Path(asked.recipe).stem:  # A file may lie elsewhere now.
        raise UsageError(
            "continue.other_recipe",
            f"{run.folder.name} trained {asked.recipe}, not {request.recipe}.",
            hint=f"Leave the recipe out: gpurun train --from {run.folder.name}. To start another run from its weights: "
            f"train.init_from, see {page('FORMATS.md')}",
        )
    told: dict[str, Any] = {"continues": run.folder.name, "recipe": request.recipe or _recipe_of(run, asked)}
    told["overrides"] = (*asked.overrides, *request.overrides)
    told["data"] = request.data or _shards_of(run, plan, asked)
    told["gpu"] = request.gpu or asked.gpu
    if not request.providers:
        of_box = (
            ("host", "host_key", "jump", "python", "price_micros_per_hour") if request.host in ("", asked.host) else ()
        )
        own = (*of_box, "identity") if asked.host else ()
        told["providers"] = asked.providers or usual
        told |= {name: getattr(request, name) or getattr(asked, name) for name in own}
        names = ("image", "setup", "setup_limit_s", "pass_env")
        outfit = {name: getattr(request.choices, name) or getattr(asked.choices, name) for name in names}
        told["choices"] = request.choices.model_copy(update=outfit)
    choices = told.get("choices", request.choices).with_limits_of(asked.choices)
    if asked.choices.trainer and not request.choices.trainer:
        choices = choices.model_copy(update={"trainer": str(run.folder.trainer)})
    bundle = request.choices.core_bundle or asked.choices.core_bundle
    told["choices"] = choices.model_copy(update={"core_bundle": bundle})
    return request.model_copy(update=told)


def going_on(resolved: ResolvedRecipe, request: Request, home: Home) -> ResolvedRecipe:
    """The recipe with the checkpoint that it goes on from; nothing of that is read yet.

    UsageError when the checkpoint is of another recipe, or has taken all steps.
    """
    run = earlier_run(request.continues, home)
    name, plan = run.folder.name, run.plan()
    if plan is None:
        raise _altered(name, "The plan")
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
    return replace(resolved, earlier=_earlier(run, plan, step, files))


def carried(data: DataSummary, resolved: ResolvedRecipe, home: Home, into: Path) -> DataSummary:
    """The data with the checkpoint beside it in `into`, read and found to be what the receipt says; it is shipped, too.

    UsageError for other shards than those the run trained on; VerificationFailed for a checkpoint that was altered.
    """
    earlier = resolved.earlier
    if earlier is None:
        return data
    run = earlier_run(earlier.run, home)
    plan, files = run.plan(), [one for one in run.files(*_KINDS) if one["step"] == earlier.step]
    if plan is None or plan.data.sha256 != data.sha256:
        where = shlex.quote(plan.data.folder) if plan and os.path.isdir(plan.data.folder) else ""
        raise UsageError(
            "continue.other_data",
            f"{earlier.run} trained on other shards than these.",
            hint=f"Give shards with --data{f' {where}' if where else ''}",
        )
    place = into / FOLDER
    for file in files:
        if not run.holds(file):
            raise _altered(earlier.run, str(file["name"]))
        target = place / str(file["name"])
        make_private(target.parent)
        _link(run.folder.artifacts / str(file["name"]), target)
    manifest = {"v": 1, "latest": earlier.step, "best": None, "files": files}
    write_atomic(place / "MANIFEST.json", json.dumps(manifest, indent=1).encode() + b"\n")
    return data.model_copy(update={"bytes": data.bytes + earlier.bytes})


def bucket_of(earlier: Earlier, home: Home) -> Iterator[str]:
    """What a plan without a bucket says where the run that it goes on from had one: the shards may still be there."""
    if url := read_plan(home.run(earlier.run)).choices.stage:
        yield f"{earlier.run} went by {url}: with --stage {shlex.quote(url)} what is still there is not sent again."


def longer_than(earlier: Earlier, steps: int) -> Iterator[str]:
    """What the plan says of more steps than were planned at first: the learning rate follows the longer schedule."""
    if steps > earlier.steps > 0:
        yield (
            f"{earlier.run} was planned for {earlier.steps:,} steps, this run is for {steps:,}: from step "
            f"{earlier.step:,} on the learning rate is that of the longer run."
        )


def others_from(earlier: Earlier, home: Home) -> Iterator[str]:
    """What the plan says of other runs that went on from the same one: their steps would be paid for twice."""
    for name in planned_runs(home):
        try:
            if earlier.run.encode() not in read_regular(home.run(name).plan):
                continue  # Of ten thousand plans few are taken apart.
            before = read_plan(home.run(name)).continues
            sight = look(home, name) if before and before.run == earlier.run else None
        except (GpurunError, OSError, ValidationError):
            continue
        if sight is None:
            continue
        if sight.unfinished:
            yield f"{name} goes on from {earlier.run} too, and is not over: gpurun attach {name}."
            continue
        brought = (record.typed for record in sight.records)
        home_files = [file for one in brought if isinstance(one, FilesBrought) for file in one.files]
        step = max((file["step"] for file in home_files if file["kind"] == "weights"), default=0)
        if step > earlier.step:
            yield f"{name} went on from {earlier.run} before, to step {step:,}: gpurun train --from {name}."


def _set_back(before: Mapping[str, Any], changed: list[str]) -> str:
    """How to have the values again that a recipe had, up to the words "a new run"; a flag cannot take a key away."""
    values = {
        key: before.get(table, {}).get(name) for key, table, name in ((one, *one.split(".", 1)) for one in changed)
    }
    flags = [f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in values.items() if value is not None]
    return f"As they were: {' '.join(flags)}. Or begin" if flags else "Begin"


def earlier_run(wanted: str, home: Home) -> VerifiedRun:
    """The run that is meant, with its receipt."""
    name = find_run(home, wanted)
    if look(home, name).unfinished:
        hint = f"gpurun stop {name} saves and ends it; where nobody drives it any more, gpurun resume {name} does."
        raise UsageError("continue.unfinished", f"{name} is not over yet.", hint=hint)
    run = verified_run(home, read_chain(home.ledger), name)
    if run is None:
        raise UsageError(
            "continue.no_receipt",
            f"{name} has no receipt that this home signed, so nothing confirms its checkpoint.",
            hint=f"gpurun audit {name} says why. Its weights can begin a run of their own: train.init_from, see "
            f"{page('FORMATS.md')}",
        )
    return run


def _newest(run: VerifiedRun) -> list[dict[str, Any]]:
    """The three files of the newest checkpoint that came home whole."""
    files = run.files(*_KINDS)
    step = newest_whole(files)
    if step is None:
        name, before = run.folder.name, run.told["asked"].get("continues")
        asked = run.request()
        again = f". Or begin again: gpurun train {asked.recipe_word}" if asked else ""
        hint = f"Is it in the bucket? gpurun collect {name}{again}"
        if before:
            hint = f"It went on from {before['run']} itself: gpurun train --from {before['run']}"
        raise UsageError("continue.no_checkpoint", f"{name} brought no whole checkpoint home.", hint=hint)
    return [one for one in files if one["step"] == step]


def newest_whole(files: Iterable[Mapping[str, Any]]) -> int | None:
    """The step of the newest checkpoint of which all three files came home; `files` as a receipt has them."""
    steps = Counter(one["step"] for one in files if one["kind"] in _KINDS)
    return max((step for step, count in steps.items() if count == len(_KINDS)), default=None)


def _earlier(run: VerifiedRun, plan: Plan, step: int, files: list[dict[str, Any]]) -> Earlier:
    """What the plan says of the checkpoint; the cost is that of the whole chain of runs that led to it."""
    spent = run.told["cost"]["upper_bound_micros"]
    before = plan.continues.spent_micros if plan.continues else Micros(0)
    return Earlier(
        run=run.folder.name,
        step=step,
        bytes=sum(int(one["bytes"]) for one in files),
        receipt_sha256=run.receipt_sha256,
        spent_micros=None if spent is None or before is None else Micros(spent + before),
        steps=int(plan.job.resolved["train"]["steps"]),
    )


def _recipe_of(run: VerifiedRun, asked: Request) -> str:
    """The recipe that a run was asked for; a UsageError where it was a file that is not there, as seen from here."""
    name = Path(asked.recipe)
    if name.stem != asked.recipe and not name.expanduser().is_file():
        raise UsageError(
            "continue.no_recipe",
            f"{run.folder.name} trained the recipe {asked.recipe}, which is not here.",
            hint=f"Say where it is: gpurun train FOLDER/{name.name} --from {run.folder.name}",
        )
    return asked.recipe


def _shards_of(run: VerifiedRun, plan: Plan, asked: Request) -> str | None:
    """The shards that a run trained on, where they are still there; else what it was given, if that was not they."""
    if plan.data.public:
        return plan.data.source if plan.data.source.startswith(HUB) else asked.data
    there = run.folder.now_at(plan.data.folder)
    if os.path.isfile(os.path.join(there, "data.json")):  # Of another user's folder it says no, and raises nothing.
        return there
    return None if asked.data == plan.data.folder else asked.data


def _link(source: Path, target: Path) -> None:
    """One file under a second name; on another disk it is copied. What is there may be a link, and goes first."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _altered(name: str, what: str) -> VerificationFailed:
    return VerificationFailed(
        "continue.altered",
        f"{what} of {name} is not there any more as its receipt has it.",
        hint=f"gpurun audit {name} says what changed; gpurun collect {name} brings back what the bucket still has.",
    )
