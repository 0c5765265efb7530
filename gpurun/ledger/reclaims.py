"""How often machines like one were taken away from this user or lost, by the journals of runs that have a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpurun.core.errors import GpurunError
from gpurun.core.journal_events import StepFailed, StopRequested, TrainObserved
from gpurun.core.journal_records import Record, all_typed
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.ledger.journal import read_journal
from gpurun.ledger.rental import Rental, rentals_of

LEAST_RUNS, MOST_RUNS = 10, 200
"""Fewer receipts say nothing of how often such a machine is taken away; older runs than the last ones are not read."""
_KIND = ("provider", "gpu", "gpu_count", "nodes", "spot")
_LOST = frozenset({"machine.lost", "boot.gone"})


@dataclass(frozen=True)
class Reclaims:
    """What became of all machines of a kind: how many there were, for how long, and how many were taken or lost."""

    machines: int
    taken: int
    seconds: float


def own_reclaims(home: Home, offer: Offer) -> Reclaims | None:
    """Return what became of this user's machines of an offer's kind; None before ten receipts tell of it.

    A run that cannot be read counts as none. The kind is the provider, the cards, and whether it was spot.
    """
    kind = {name: getattr(offer, name) for name in _KIND}
    runs, found = 0, list[Rental]()
    for folder in (home.run(name) for name in home.run_names()[-MOST_RUNS:]):
        if not folder.receipt.exists():
            continue
        with suppress(OSError, ValueError, GpurunError):
            rentals = [rental for rental in rentals_of(read_journal(folder.journal).records) if rental.end != "refused"]
            alike = [rental for rental in rentals if {name: rental.intent.offer.get(name, 1) for name in _KIND} == kind]
            runs, found = runs + bool(alike), found + alike
    if runs < LEAST_RUNS:
        return None
    taken = sum(was_taken(rental.records) for rental in found)
    return Reclaims(len(found), taken, sum(rental.seconds for rental in found))


def was_taken(records: Sequence[Record]) -> bool:
    """Whether the machine of these records was taken away by its provider, or lost while it worked."""
    ends = list(all_typed(records, TrainObserved))
    is_lost = any(end.outcome == "lost" or end.reason == "preempted" for end in ends)
    return is_lost or any(failure.code in _LOST for failure in all_typed(records, StepFailed))


def is_time_over(records: Sequence[Record]) -> bool:
    """Whether the machine of these records ended because its time was over: so it was not taken away."""
    ends, stops = all_typed(records, TrainObserved), all_typed(records, StopRequested)
    is_over = any((end.outcome, end.reason) == ("stopped", "lease") for end in ends)
    return is_over or any(stop.by == "lease" for stop in stops)
