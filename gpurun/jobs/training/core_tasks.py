"""CORE at the end of a run: its bundle made into items beside the shards, and what answering them takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.core.money import cost_of, format_usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import DataSummary, Plan, Request
from gpurun.data.core_bundle import FILE, bundle_file, local_file, write_core
from gpurun.data.refusals import Say
from gpurun.jobs.training.estimate import CORE_TASKS, FORWARD_SHARE, core_tokens
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.view.number_format import format_count, format_duration, short_hash


def with_core(
    data: DataSummary, request: Request, resolved: ResolvedRecipe, home: Home, into: Path, say: Say
) -> DataSummary:
    """The data with the items of CORE beside it in `into`, where the recipe wants them; they are shipped, too."""
    most = resolved.tables.eval.core
    if not most:
        return data
    demand_bundle(request, most)
    bundle = bundle_file(request.choices.core_bundle, home.cache / "core", say)
    digest, _ = write_core(bundle, most, into, into, say)
    size = (into / FILE).stat().st_size
    return data.model_copy(update={"bytes": data.bytes + size, "core_sha256": digest})


def demand_bundle(request: Request, most: int) -> None:
    """Refuse items of CORE without a bundle, and a bundle of which no item is wanted."""
    bundle = request.choices.core_bundle
    if most and not bundle:
        what = f"eval.core is {most}, and no bundle with CORE's tasks was given."
        raise UsageError(
            "core.no_bundle", what, hint="Name it: --core-bundle eval_bundle.zip (or its https:// address)."
        )
    if most and "://" not in bundle:
        local_file(bundle)
    if bundle and not most and not request.dry_run:  # A recipe's rehearsal may leave it out.
        what = "--core-bundle is given, and eval.core is 0: no item of it would be answered."
        raise UsageError("core.unused", what, hint="Say how many of each task: --set eval.core=500, or leave it out.")


def core_note(plan: Plan) -> Iterator[str]:
    """What the plan says of it: how much of it there is, and what it takes of time and dollars."""
    most, digest = int(plan.job.resolved["eval"].get("core", 0)), plan.data.core_sha256
    if not most:
        return
    said = f"CORE is taken after the last step: up to {most:,} items of each of its {CORE_TASKS} tasks"
    if digest:
        said += f" (bundle sha256 {short_hash(digest)})"
    if plan.estimate.tokens_per_s is None:
        yield f"{said}."
        return
    tokens, (low, high) = core_tokens(plan.job.resolved), plan.estimate.tokens_per_s
    seconds = tokens * FORWARD_SHARE * (low + high) / (2 * low * high)
    price = f", {format_usd(cost_of(plan.offer.rate_micros_per_hour, seconds))}" if plan.worst_micros else ""
    yield f"{said}, about {format_count(tokens)} tokens, {format_duration(seconds)}{price}; that is in the time above."
