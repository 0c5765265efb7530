"""What would have to be smaller for a model to fit: each dimension by itself, cut no further than is needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from gpurun.core.model import Offer
from gpurun.planning.memory import GIB, USABLE_SHARE, peak_on, usable_bytes
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
    allowed = {
        "context": [size for size in range(1, model.context) if batch % (size * processes) == 0],
        "layers": list(range(1, model.layers)),
        "width": list(range(unit, model.width, unit)),
    }
    for name, values in allowed.items():
        # What is smaller than one that fits does so too; "not" turns that into the order that bisect wants.
        smaller = [model.model_copy(update={name: value}) for value in values]
        place = bisect_left(smaller, True, key=lambda one: not fits(one))
        if place:
            yield f"{name} {getattr(model, name)} -> {values[place - 1]}"
