"""Prepare or check the shards of a planned run, and the other files that are uploaded with them."""

from __future__ import annotations

from pathlib import Path

from gpurun.core.places import place_kinds
from gpurun.core.run_plan import DataSummary, Request
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.planning.candidates import need_of
from gpurun.planning.place import Desk
from gpurun.planning.transfer import public_shards


def summarize_shards(request: Request, resolved: ResolvedRecipe, desk: Desk) -> DataSummary:
    """Prepare a run's shards, initial weights or checkpoint, and compile caches for --warm. Return the summary."""
    from gpurun.jobs.training.compile_cache import with_compile_caches
    from gpurun.jobs.training.continued_training import with_checkpoint_beside
    from gpurun.jobs.training.initial_weights import add_initial_weights, take_checkpoint

    into, found = desk.home.staged_data(desk.run), prepared_shards(request, resolved, desk)
    if request.choices.init:
        take_checkpoint(Path(request.choices.init), into)
    data = with_checkpoint_beside(add_initial_weights(found, resolved, into), resolved, desk.home, into)
    if resolved.tables.eval.core:
        from gpurun.jobs.training.core_tasks import with_core

        data = with_core(data, request, resolved, desk.home, into, desk.say)
    need = need_of(request, resolved, is_rented=place_kinds(request.providers) <= {"cloud"})
    return with_compile_caches(data, request, resolved, need, desk.home, into)


def prepared_shards(request: Request, resolved: ResolvedRecipe, desk: Desk) -> DataSummary:
    """Prepare only the shards and return the summary. For a public set, read its list of files from the hub."""
    from gpurun.data.run_shards import prepare_run_shards

    named = public_shards(request, resolved.tables.data.source) or request.data
    into, accept_skipped = desk.home.staged_data(desk.run), request.choices.accept_skipped
    cache = desk.home.shards
    return prepare_run_shards(
        resolved.record, named, into=into, cache=cache, say=desk.say, accept_skipped=accept_skipped
    )
