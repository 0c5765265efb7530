"""What would have to be smaller for a model to fit: each dimension by itself, cut no further than is needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from gpurun.core.model import Offer
from gpurun.planning.memory import GIB, USABLE_SHARE, divisors, peak_on, usable_bytes
from gpurun.planning.recipe import ResolvedRecipe
from gpurun.planning.tables import ModelTable

__all__ = ["what_would_fit"]


def what_would_fit(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> str:
    """One clause: what a micro-batch of one sequence needs, what there is, and which cuts would do."""
    peak = peak_on(recipe, offer, processes, 1, vocab_size)
    needs = f"micro_batch 1 needs {peak / GIB:.1f} GiB, {USABLE_SHARE:.0%} of {offer.vram_gb} GiB are usable"

    def fits(model: ModelTable) -> bool:
        smaller = recipe.model_copy(update={"tables": recipe.tables.model_copy(update={"model": model})})
        return peak_on(smaller, offer, processes, 1, vocab_size) <= usable_bytes(offer)

    cuts = list(_cuts(recipe, processes, fits))
    if not cuts:
        return f"{needs}: no cut of context, layers or width alone would fit"
    return f"{needs}: {' or '.join(cuts)} would fit"


def _cuts(recipe: ResolvedRecipe, processes: int, fits: Callable[[ModelTable], bool]) -> Iterator[str]:
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
            return not fits(model.model_copy(update={name: value}))

        # What is smaller than one that fits does so too.
        if place := bisect_left(values, True, key=is_too_large):
            yield f"{name} {getattr(model, name)} -> {values[place - 1]}"
