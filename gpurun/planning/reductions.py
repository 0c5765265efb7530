"""What would have to be smaller for a model to fit: each dimension by itself, cut no further than is needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpurun.core.model import Offer
from gpurun.planning.memory import GIB, USABLE_SHARE, divisors, memory_gib, peak_on, usable_bytes
from gpurun.planning.recipe import ResolvedRecipe

__all__ = ["lacks_memory", "what_would_fit"]

_LEAST = "micro_batch 1 needs"


def what_would_fit(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> str:
    """One clause: what a micro-batch of one sequence needs, what there is, and which cuts would do.

    Where several cards would hold the model in shares, which the recipe forbids, that comes first.
    """
    peak = peak_on(recipe, offer, processes, 1, vocab_size)
    needs = f"{_LEAST} {peak / GIB:.1f} GiB, {USABLE_SHARE:.0%} of {memory_gib(offer, processes):g} GiB are usable"

    def fits(other: ResolvedRecipe) -> bool:
        return peak_on(other, offer, processes, 1, vocab_size) <= usable_bytes(offer, processes)

    cuts = list(_cuts(recipe, processes, fits))
    if recipe.tables.train.parallel == "ddp" and fits(_changed(recipe, "train", parallel="fsdp")):
        cuts.insert(0, "parallel ddp -> fsdp")
    if not cuts:
        return f"{needs}: no cut of context, layers or width alone would fit"
    return f"{needs}: {' or '.join(cuts)} would fit"


def lacks_memory(basis: str) -> bool:
    """Whether this is what an estimate rests on that found no room for one sequence."""
    return basis.startswith(_LEAST)


def _changed(recipe: ResolvedRecipe, table: str, **keys: Any) -> ResolvedRecipe:
    tables = recipe.tables
    update = {table: getattr(tables, table).model_copy(update=keys)}
    return recipe.model_copy(update={"tables": tables.model_copy(update=update)})


def _cuts(recipe: ResolvedRecipe, processes: int, fits: Callable[[ResolvedRecipe], bool]) -> Iterator[str]:
    """The largest value of each dimension that fits, among those that the rest of the recipe allows."""
    model, batch = recipe.tables.model, recipe.tables.train.batch_tokens
    unit = model.heads * (2 if model.preset == "modern" else 1)
    allowed: dict[str, Sequence[int]] = {
        "context": [size for size in divisors(batch // processes) if size < model.context],
        "layers": range(1, model.layers),
        "width": range(unit, model.width, unit),
    }
    for name, values in allowed.items():

        def is_too_large(value: int, name: str = name) -> bool:
            return not fits(_changed(recipe, "model", **{name: value}))

        # What is smaller than one that fits does so too.
        if place := bisect_left(values, True, key=is_too_large):
            yield f"{name} {getattr(model, name)} -> {values[place - 1]}"
