"""Prepares the items of the CORE benchmark, which the trainer answers after its last step, and estimates their cost."""

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
    """If the recipe evaluates CORE, write its items to `into`; return the data with their size and digest added."""
    most = resolved.tables.eval.core
    if not most:
        return data
    require_core_bundle(request, most)
    bundle = bundle_file(request.choices.core_bundle, home.cache / "core", say)
    digest, _ = write_core(bundle, most, into, into, say)
    size = (into / FILE).stat().st_size
    return data.model_copy(update={"bytes": data.bytes + size, "core_sha256": digest})


def require_core_bundle(request: Request, most: int) -> None:
    """Raise UsageError if the recipe evaluates CORE without a bundle, or a bundle is given but not evaluated."""
    bundle = request.choices.core_bundle
    if most and not bundle:
        what = f"eval.core is {most}, but there is no bundle with the tasks of CORE."
        raise UsageError(
            "core.no_bundle", what, hint="Name it: --core-bundle eval_bundle.zip (or its https:// address)."
        )
    if most and "://" not in bundle:
        local_file(bundle)
    if bundle and not most and not request.dry_run:  # A recipe's rehearsal may leave CORE out.
        what = "--core-bundle is given, but eval.core is 0, so CORE would not be evaluated."
        hint = "Set the number of items per task: --set eval.core=500; or leave --core-bundle out."
        raise UsageError("core.unused", what, hint=hint)


def core_note(plan: Plan) -> Iterator[str]:
    """Yield the plan's note about CORE: its number of items, its time and its cost."""
    most, digest = int(plan.job.resolved["eval"].get("core", 0)), plan.data.core_sha256
    if not most:
        return
    note = f"CORE is evaluated after the last step: up to {most:,} items of each of its {CORE_TASKS} tasks"
    if digest:
        note += f" (bundle sha256 {short_hash(digest)})"
    if plan.estimate.tokens_per_s is None:
        yield f"{note}."
        return
    tokens, (low, high) = core_tokens(plan.job.resolved), plan.estimate.tokens_per_s
    seconds = tokens * FORWARD_SHARE * (low + high) / (2 * low * high)
    price = f", {format_usd(cost_of(plan.offer.rate_micros_per_hour, seconds))}" if plan.worst_micros else ""
    yield f"{note}, about {format_count(tokens)} tokens, {format_duration(seconds)}{price}; the time above includes it."
