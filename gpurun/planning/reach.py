"""How far a lease gets where it does not hold the whole run, and the loss there if an own run has shown it."""

from __future__ import annotations

from gpurun.core.plan import Estimate, Lease, Reach
from gpurun.planning.estimate import steps_of_work
from gpurun.planning.priors import Prior, loss_at
from gpurun.planning.recipe import ResolvedRecipe

__all__ = ["reach_of", "reach_words"]


def reach_of(recipe: ResolvedRecipe, guess: Estimate, lease: Lease | None, known: Prior | None) -> Reach | None:
    """The last step that a lease holds at the likely speed; None where no speed is known or there is no lease.

    `known` is an own run of the very same recipe. What a start takes is taken off first, so that as many steps, asked
    for alone, do finish in that lease.
    """
    if lease is None or guess.train_s is None or guess.tokens_per_s is None or guess.likely_s is None:
        return None
    first, left, steps = recipe.first_step, recipe.steps_left, recipe.tables.train.steps
    step = steps
    if lease.train_s < guess.likely_s:
        tokens = steps_of_work(recipe) * recipe.tables.train.batch_tokens
        # The slow end starts slowly too: what it has beside its steps is the longest start.
        start_s = max(0.0, guess.train_s[1] - tokens / guess.tokens_per_s[0])
        share = (lease.train_s - start_s) / max(1e-9, guess.likely_s - start_s)
        step = first + max(0, min(left - 1, int(left * share)))
    loss = loss_at(known, step) if known is not None and step else None
    of = known.run if known and loss is not None else ""
    return Reach(step=step, steps=steps, train_s=lease.train_s, val_loss=loss, val_loss_of=of)


def reach_words(reach: Reach) -> str:
    """`step 3,950 of 18,865 (21 %)`, and what the validation loss was there."""
    words = f"step {reach.step:,} of {reach.steps:,} ({reach.step / reach.steps:.0%})"
    if reach.val_loss is None:
        return words
    return f"{words}, where your run {reach.val_loss_of} had a validation loss of {reach.val_loss:.2f}"
