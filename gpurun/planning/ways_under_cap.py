"""What a refusal over the cap names of a job of any kind: the same cards as a spot machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy

from gpurun.core.errors import GpurunError
from gpurun.core.run_plan import Candidate
from gpurun.planning.planner import Proposal, make_plan


def way_on_spot(proposal: Proposal, costs: Callable[[Candidate], str]) -> Iterator[str]:
    """Yield what to add for a spot machine with the cards that were asked for, if the cap pays for one.

    Where it pays for a second start-up too, the run continues on another machine. Only a cloud that is asked knows of
    one: the catalogue has no spot prices. `costs` says what an offer costs and for how long.
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
                flags, then = "--spot --keep-going", "and on another machine where that one is taken away"
            yield f"{flags}: {costs(plan.chosen)}, on {plan.offer.provider}, {then}"
