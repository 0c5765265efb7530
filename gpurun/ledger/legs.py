"""The machines that a run was on, one after the other: each with its cost, its steps, and how the one before ended."""

from __future__ import annotations

from collections.abc import Sequence

from gpurun.core.journal_events import LegPlanned, TrainObserved
from gpurun.core.journal_records import Record, last_typed
from gpurun.core.receipt_record import LegTold
from gpurun.core.untrusted import plain_data, plain_line
from gpurun.ledger.rental import Rental, rentals_of


def legs_of(records: Sequence[Record]) -> list[LegTold]:
    """Return a line for each machine of a run that continued on another; [] for a run that never did.

    `step` is the checkpoint that it started from. `again` counts the steps after that, which an earlier machine had
    trained too: they were lost with it. `why` says how the machine ended, where another one followed.
    """
    plans = [(one.seq, one.typed) for one in records if isinstance(one.typed, LegPlanned)]
    if not any(plan.token for _, plan in plans):
        return []
    found: list[LegTold] = []
    for rental in rentals_of(records):
        before = [plan for seq, plan in plans if seq < rental.records[0].seq]
        after = next((plan for _, plan in plans if plan.token == rental.token), None)
        if rental.end == "refused":
            continue
        found.append(_told(rental, before, after))
    return found


def _told(rental: Rental, before: Sequence[LegPlanned], after: LegPlanned | None) -> LegTold:
    offer, plan = rental.intent.offer, before[-1] if before else None
    ended = last_typed(rental.records, TrainObserved)
    told: LegTold = {
        "leg": plan.number if plan is not None else 1,
        "token": rental.token,
        "provider": rental.intent.provider,
        "region": plain_data(offer.get("region")),
        "gpu": plain_data(offer.get("gpu")),
        "gpu_count": plain_data(offer.get("gpu_count")),
        "spot": offer.get("spot") is True,
        "step": plan.step if plan is not None else 0,
        "again": max(0, plan.reached - plan.step) if plan is not None else 0,
        "micros": rental.micros if rental.ended else None,
        "outcome": ended.outcome if ended is not None else "none",
    }
    if after is not None:
        told["why"] = plain_line(after.why)
    return told
