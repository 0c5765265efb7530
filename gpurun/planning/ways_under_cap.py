"""Suggest a spot machine when a request is over its cap, for every kind of job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy

from gpurun.core.errors import GpurunError
from gpurun.core.run_plan import Candidate
from gpurun.planning.planner import Proposal, make_plan


def way_on_spot(proposal: Proposal, costs: Callable[[Candidate], str]) -> Iterator[str]:
    """Yield the flags for a spot machine with the requested GPUs, if the cap pays for one.

    If the cap also pays for a second start-up, suggest --keep-going as well. Only clouds that can be queried count,
    because the catalogue has no spot prices. `costs` returns a phrase with an offer's cost and duration.
    """
    choices = proposal.request.choices
    if choices.spot:
        return
    other = copy(proposal)
    other.request = proposal.request.model_copy(
        update={"choices": choices.model_copy(update={"spot": True, "keep_going": True})}
    )
    with suppress(GpurunError):
        plan = make_plan(other, need_data=False)
        if plan.offer.spot:
            flags, then = "--spot", "which may take it away at any moment"
            if plan.choices.keep_going:
                flags, then = "--spot --keep-going", "and then on another machine if that one is taken away"
            yield f"{flags}: {costs(plan.chosen)}, on {plan.offer.provider}, {then}"
