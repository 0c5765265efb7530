"""Counts how often the user's machines of one kind were taken away or lost, by the journals of runs with a receipt."""

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
"""The least number of runs from which a frequency is derived, and the number of the latest runs that are read."""
_KIND = ("provider", "gpu", "gpu_count", "nodes", "spot")
_LOST = frozenset({"machine.lost", "boot.gone"})


@dataclass(frozen=True)
class Reclaims:
    """The number of machines of a kind, how many of them were taken away or lost, and their billable seconds."""

    machines: int
    taken: int
    seconds: float


def own_reclaims(home: Home, offer: Offer) -> Reclaims | None:
    """Return how often this user's machines of the same kind as an offer were taken away or lost.

    None if fewer than LEAST_RUNS runs with a receipt had such a machine. Runs that cannot be read are left out. The
    kind is the provider, the GPUs and nodes, and whether it is spot.
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
    """Return whether the machine of these records was taken away by its provider, or was lost."""
    ends = list(all_typed(records, TrainObserved))
    is_lost = any(end.outcome == "lost" or end.reason == "preempted" for end in ends)
    return is_lost or any(failure.code in _LOST for failure in all_typed(records, StepFailed))


def is_time_over(records: Sequence[Record]) -> bool:
    """Return whether the machine of these records ended because its time was over: then it was not taken away."""
    ends, stops = all_typed(records, TrainObserved), all_typed(records, StopRequested)
    is_over = any((end.outcome, end.reason) == ("stopped", "lease") for end in ends)
    return is_over or any(stop.by == "lease" for stop in stops)
