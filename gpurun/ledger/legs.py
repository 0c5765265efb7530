"""The receipt's entries for the machines of a run that continued on others: cost, steps, and reason of each end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpurun.core.journal_events import LegPlanned, TrainObserved
from gpurun.core.journal_records import Record, last_typed
from gpurun.core.money import Micros
from gpurun.core.receipt_record import ReceiptLeg
from gpurun.core.untrusted import plain_data, plain_line
from gpurun.ledger.paid_phases import phases_s
from gpurun.ledger.rental import Rental, rentals_of

_AT_THE_END = ("collect", "hold", "destroy", "other")
"""The phases after the training, which an unbroken run has only once; "other" is the time outside of all phases."""


def legs_of(records: Sequence[Record]) -> list[ReceiptLeg]:
    """Return an entry for each machine of a run that continued on another machine; [] for a run that never did.

    In an entry, `step` is the checkpoint from which the machine started. `again` counts the steps after this checkpoint
    that an earlier machine had trained and that were lost. `why` is the reason of the machine's end, if another machine
    followed.
    """
    plans = [(record.seq, record.typed) for record in records if isinstance(record.typed, LegPlanned)]
    if not any(plan.token for _, plan in plans):
        return []
    legs: list[_Leg] = []
    for rental in (rental for rental in rentals_of(records) if rental.end != "refused"):
        before = [plan for seq, plan in plans if seq < rental.records[0].seq]
        after = next((plan for _, plan in plans if plan.token == rental.token), None)
        legs.append(_Leg(rental, before[-1] if before else None, after, phases_s([rental])))
    lost = {leg.rental.token: leg for leg in legs}
    return [_build_entry(leg, lost.get(_find_lost_token(leg, plans)), legs[0], legs[-1]) for leg in legs]


def on_demand_of(rentals: Sequence[Rental]) -> Micros | None:
    """Return what the time of a run's only rental would have cost on demand.

    None if the run had several rentals, or if the price on demand or the end of the rental is not known.
    """
    rented = [rental for rental in rentals if rental.end != "refused"]
    rate = _find_on_demand_rate(rented[0]) if len(rented) == 1 else None
    return None if rate is None else rented[0].share_of_time(rented[0].seconds, rate, is_last=True)


def _find_on_demand_rate(rental: Rental) -> Micros | None:
    """Return the price on demand in a spot rental's offer; None if the offer has none, or the rental has not ended."""
    rate = rental.intent.offer.get("on_demand_micros_per_hour")
    return Micros(rate) if isinstance(rate, int) and rate > 0 and rental.ended else None


@dataclass(frozen=True)
class _Leg:
    """One machine of a run, with its paid seconds by phase.

    `plan` is the leg's plan by which it was requested, None for the first. `after` is the plan that followed its loss.
    """

    rental: Rental
    plan: LegPlanned | None
    after: LegPlanned | None
    phases: dict[str, float]

    @property
    def step(self) -> int:
        """Return the step of the checkpoint from which the machine started; 0 for a start from the beginning."""
        return self.plan.step if self.plan is not None else 0

    @property
    def lost_s(self) -> float:
        """Return the seconds in which the machine trained the steps that were lost: a share of its training time."""
        if self.after is None:
            return 0.0
        trained, lost = self.after.reached - self.step, self.after.reached - self.after.step
        return self.phases.get("training", 0.0) * min(1.0, max(0, lost) / trained) if trained > 0 else 0.0

    def unbroken_s(self, *, is_first: bool, is_last: bool) -> float:
        """Return the machine's seconds that an unbroken run would also have needed.

        These are the seconds for the steps that were kept, the start-up of the first machine, and the end of the last.
        """
        end_s = sum(self.phases.get(name, 0.0) for name in _AT_THE_END)
        training_s = self.phases.get("training", 0.0)
        start_s = sum(self.phases.values()) - end_s - training_s
        return training_s - self.lost_s + (start_s if is_first else 0.0) + (end_s if is_last else 0.0)


def _find_lost_token(leg: _Leg, plans: Sequence[tuple[int, LegPlanned]]) -> str:
    """Return the token of the machine that was lost before a leg; "" if there is none."""
    number = leg.plan.number if leg.plan is not None else 0
    return next((plan.token for _, plan in plans if plan.number == number and plan.token), "")


def _build_entry(leg: _Leg, lost: _Leg | None, first: _Leg, last: _Leg) -> ReceiptLeg:
    """Return the receipt's entry for a leg. `lost` is the machine that was lost before it, None if there is none."""
    rental, plan, offer = leg.rental, leg.plan, leg.rental.intent.offer
    ended = last_typed(rental.records, TrainObserved)
    entry: ReceiptLeg = {
        "leg": plan.number if plan is not None else 1,
        "token": rental.token,
        "provider": rental.intent.provider,
        "region": plain_data(offer.get("region")),
        "gpu": plain_data(offer.get("gpu")),
        "gpu_count": plain_data(offer.get("gpu_count")),
        "spot": offer.get("spot") is True,
        "step": leg.step,
        "again": max(0, plan.reached - plan.step) if plan is not None else 0,
        "micros": rental.micros if rental.ended else None,
        "outcome": ended.outcome if ended is not None else "none",
    }
    if entry["again"] and lost is not None and lost.rental.ended:
        entry["again_micros"] = lost.rental.share_of_time(lost.lost_s, Micros(lost.rental.rate))
    if (rate := _find_on_demand_rate(rental)) is not None:
        seconds = leg.unbroken_s(is_first=leg is first, is_last=leg is last)
        entry["on_demand_micros"] = rental.share_of_time(seconds, rate, is_last=leg is last)
    if leg.after is not None:
        entry["why"] = plain_line(leg.after.why)
    return entry
