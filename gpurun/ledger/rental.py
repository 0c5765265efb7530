"""Computes the cost of rentals from the journal, with extra machines and the readings that prove each end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from gpurun.core.clock import utc
from gpurun.core.journal_events import (
    BillObserved,
    CollectObserved,
    DeathProven,
    DeathRead,
    Incident,
    PriceRose,
    RunOpened,
)
from gpurun.core.journal_records import Event, Record, all_typed, last_typed, microseconds
from gpurun.core.money import SECONDS_PER_HOUR, Figure, Micros, cost_of, left_of, times, total
from gpurun.core.receipt_record import Proof
from gpurun.core.receipt_rules import CAP_BROKEN_WHERE_SEEN
from gpurun.core.untrusted import plain_data
from gpurun.ledger.billed_time import BY_BILL, BY_TIMER, MEASURED, REPORTED, UNSEEN, BilledTime, elapsed_ms, nearest_ms

_BOUNDS = {
    MEASURED: "the machine was watched until its provider showed it as gone",
    REPORTED: "by the provider's own start and end times",
    BY_BILL: "by the provider's bill, read twice with the same amount; its end was not seen",
    BY_TIMER: "at most, by the time limit at which its provider ends it; its end was not seen",
    UNSEEN: "at most, up to the first reading that showed it gone; its end was not seen",
    None: "up to the proof that it is gone",
}
_EXTRA = "at most, including a second machine from its request on"
_LIMIT = "at most, at the highest price per hour that its provider may bill"
_UNREAD = "the provider's bill was not read"
GONE = ("create.duplicate_gone", "create.late_gone")


@dataclass(frozen=True)
class ExtraRental:
    """A second machine with a rental's token, which is paid for, too.

    `seconds` count from the create intent to its proven end or, until it has `ended`, to the last record.
    """

    id: str
    seconds: float
    ended: bool


@dataclass(frozen=True)
class PaidRise:
    """A price increase while the machine ran: the new price, the increase, and the seconds from then to the end."""

    micros_per_hour: Micros
    more_micros_per_hour: Micros
    seconds: float


@dataclass(frozen=True)
class Rental(BilledTime):
    """One rental with its cost, and with the extra machines of its token."""

    extras: tuple[ExtraRental, ...] = ()

    @property
    def machines(self) -> int:
        """Return how many machines are paid for during the whole rental.

        It is 1, plus the duplicates that an older gpurun recorded without an id; the others are in `extras`.
        """
        incidents = all_typed(self.records, Incident)
        return 1 + len([incident for incident in incidents if incident.code == "create.duplicate" and not incident.id])

    @property
    def ended(self) -> bool:
        """Return whether the rental can cost nothing more: its machine and all extra machines are proven gone."""
        return self.end != "not_proven" and all(extra.ended for extra in self.extras)

    @property
    def gpu_hours(self) -> float:
        """Return the billable hours of the machine times its GPUs; a node without GPUs counts as one GPU."""
        return self._compute_gpu_hours(self.seconds)

    @property
    def most_gpu_hours(self) -> float:
        """Return the billable GPU-hours of the machine and all extra machines together."""
        return self._compute_gpu_hours(self.machines * self.seconds + sum(extra.seconds for extra in self.extras))

    @property
    def longest_gpu_hours(self) -> float:
        """Return the most GPU-hours that the rental can take: as if its machine lived until the lease ends it."""
        return max(
            self.most_gpu_hours, self._compute_gpu_hours(self.intent.lease.total_s + self.intent.lease.kill_allowance_s)
        )

    def _compute_gpu_hours(self, seconds: float) -> float:
        offer = self.intent.offer
        return seconds * int(offer["gpu_count"] or offer.get("nodes", 1) * offer.get("jobs", 1)) / SECONDS_PER_HOUR

    @property
    def rises(self) -> list[PaidRise]:
        """Return each price increase while the machine ran, counted from the last reading of the price before."""
        found: list[PaidRise] = []
        before = self.rate
        for record in self.records:
            if record.event is Event.INCIDENT and isinstance(rose := record.typed, PriceRose):
                late_us = microseconds(record.wall) - microseconds(rose.since_wall)
                since_ms = self.ms_until(record) - max(0, nearest_ms(late_us))
                rate = rose.rate_micros_per_hour
                if rate > before:
                    ms = max(0, round(1000 * self.seconds) - max(0, since_ms))
                    found.append(PaidRise(Micros(rate), left_of(Micros(rate), Micros(before)), ms / 1000))
                before = max(before, rate)
        return found

    @property
    def micros(self) -> Micros:
        """Return the most that the rental has cost by its records, in micro-dollars, with all its machines."""
        unit_s = self.intent.billing_unit_s
        once = self._egress_cost if self.seconds else Micros(0)
        rises = total(*(cost_of(rise.more_micros_per_hour, rise.seconds, unit_s) for rise in self.rises))
        own = times(total(self._cost_of_seconds(self.seconds), rises, once), self.machines)
        return total(own, *(self.micros_of(extra) for extra in self.extras))

    @property
    def least_micros(self) -> Micros:
        """Return the least that the rental cost: the machine alone, for the seconds that are certainly billed.

        It is 0 if the provider reported only the most that it bills per hour.
        """
        return Micros(0) if self.rate_is_limit else self._cost_of_seconds(self.least_seconds)

    @property
    def _egress_cost(self) -> Micros:
        """Return the cost of the data that left the machine: as counted or, if it was not counted, as planned.

        It is 0 for a machine that never answered, and at least the planned cost for a job that may send data itself.
        """
        counted, planned = last_typed(self.records, CollectObserved), Micros(self.intent.egress_micros)
        if counted is None:
            return planned if self.last(Event.READY_OBSERVED) else Micros(0)
        sent = planned if counted.egress_micros is None else Micros(counted.egress_micros)
        return max(sent, planned) if self.intent.sends_itself else sent

    def micros_of(self, extra: ExtraRental) -> Micros:
        """Return what an extra machine of this rental has cost."""
        return self._cost_of_seconds(extra.seconds)

    def share_of_time(self, seconds: float, rate: Micros, *, is_last: bool = False) -> Micros:
        """Return the cost of a part of the rental's seconds at a rate per hour, with what comes with the machine.

        With `is_last`, the cost of the data that left the machine is included.
        """
        beside = Micros(self.intent.beside_micros_per_hour)
        return total(cost_of(rate, seconds), cost_of(beside, seconds), self._egress_cost if is_last else Micros(0))

    def _cost_of_seconds(self, seconds: float) -> Micros:
        """Return the cost of so many seconds of a machine and what comes with it, at least the provider's minimum."""
        unit_s, beside = self.intent.billing_unit_s, Micros(self.intent.beside_micros_per_hour)
        paid_s = max(seconds, float(self.intent.least_billed_s)) if seconds else 0.0
        return total(cost_of(Micros(self.rate), paid_s, unit_s), cost_of(beside, paid_s, unit_s))

    def proof(self) -> Proof:
        """Return the receipt's entry about the machine's end, with the readings of the machine."""
        claimed = last_typed(self.records, DeathProven)
        reads = [(record.wall, record.typed) for record in self.records if record.event is Event.DEATH_READ]
        return {
            "token": self.token,
            "teardown": self.end,
            "id": plain_data(claimed and claimed.id),
            "reads": plain_data(claimed and claimed.reads),
            "spread_s": plain_data(claimed and claimed.spread_s),
            "evidence_sha256": plain_data(claimed and claimed.evidence_sha256),
            "readings": [
                {"at": utc(wall), "state": read.state, "listed": read.listed, "answer_sha256": read.answer_sha256}
                for wall, read in reads
                if isinstance(read, DeathRead)
            ],
        }


def are_costs_bounded(rentals: Sequence[Rental]) -> bool:
    """Return whether the journal bounds the cost: each machine is proven gone, and nothing was paid beside them."""
    return all(rental.ended for rental in rentals) and not is_more_than_recorded(rentals)


def is_cap_kept(rentals: Sequence[Rental], upper: Micros, cap: Micros, rules: int) -> bool | None:
    """Return whether rentals that cost `upper` at most kept a cap; None if that is not known.

    The cap was broken if the least that they cost is over it. By rules before CAP_BROKEN_WHERE_SEEN it was broken if
    `upper` is over it, unless `upper` is only a bound.
    """
    if upper <= cap:
        return True
    if rules < CAP_BROKEN_WHERE_SEEN:
        return None if figure_of(rentals) is Figure.BOUND else False
    return False if total(*(rental.least_micros for rental in rentals)) > cap else None


def figure_of(rentals: Sequence[Rental], *, is_watched: bool = False) -> Figure:
    """Return what kind of figure the cost of these rentals is: measured, billed, a bound, a floor, or so far.

    `is_watched` means that a process drives the run now.
    """
    paid = [rental for rental in rentals if rental.rate or rental.extras]
    unended = [rental for rental in paid if not rental.ended]
    if is_more_than_recorded(rentals):
        return Figure.FLOOR
    if unended and is_watched:
        return Figure.SO_FAR
    if not all(rental.begun for rental in unended):  # It is not known whether the job still waits in its queue.
        return Figure.FLOOR
    is_unseen = any(rental.extras or rental.end_is in (UNSEEN, BY_TIMER) for rental in paid)
    if unended or is_unseen or any(rental.rate_is_limit for rental in paid):
        return Figure.BOUND
    return Figure.BILLED if any(rental.end_is == BY_BILL for rental in paid) else Figure.MEASURED


def billed_by(rentals: Sequence[Rental]) -> Micros | None:
    """Return the sum of the bills for these rentals; None if a bill was not read, or if there were extra machines."""
    paid = [rental for rental in rentals if rental.end != "refused" and (rental.rate or rental.extras)]
    bills = [rental.billed for rental in paid if rental.billed is not None and not rental.extras]
    return total(*bills) if paid and len(bills) == len(paid) else None


def unseen_ends(rentals: Sequence[Rental]) -> list[Rental]:
    """Return the paid rentals whose end was neither seen nor reported, and whose bill was not read."""
    return [
        rental
        for rental in rentals
        if rental.ended and rental.rate and rental.end_is == UNSEEN and rental.billed is None
    ]


def is_more_than_recorded(rentals: Sequence[Rental]) -> bool:
    """Return whether more was paid than the records show: for a leftover, or for a machine that appeared late.

    A late machine counts here only if it is not among the extra machines of the rentals.
    """
    incidents = [incident for rental in rentals for incident in all_typed(rental.records, Incident)]
    counted = {extra.id for rental in rentals for extra in rental.extras}
    late = any(incident.code == "create.late" and incident.id not in counted for incident in incidents)
    return late or any(incident.code == "leftover" and incident.billed for incident in incidents)


def rentals_of(records: Sequence[Record]) -> list[Rental]:
    """Return the rentals in a journal, oldest first. Each has the records from its create intent to the next one."""
    starts = [place for place, record in enumerate(records) if record.event is Event.CREATE_INTENDED]
    cut = [BilledTime(tuple(records[start:end])) for start, end in pairwise([*starts, len(records)])]
    return [
        Rental(piece.records, _find_billed_amount(piece, records), tuple(_list_extras(piece, records))) for piece in cut
    ]


def _find_billed_amount(rental: BilledTime, records: Sequence[Record]) -> Micros | None:
    """Return the amount on the bill for a rental's machine; None if the bill was not read."""
    bills = [bill.micros for bill in all_typed(records, BillObserved) if bill.token == rental.token]
    return Micros(bills[-1]) if bills else None


def _list_extras(rental: BilledTime, records: Sequence[Record]) -> Iterator[ExtraRental]:
    """Yield the extra machines with a rental's token. All of them are paid from the rental's create intent on."""
    proofs = [record.seq for record in rental.records if record.event is Event.DEATH_PROVEN]
    noted = [(record.seq, record.typed) for record in records if record.event is Event.INCIDENT]
    about = [(seq, its) for seq, its in noted if isinstance(its, Incident) and its.id and its.token == rental.token]
    longest_ms = rental.longest_ms or inf  # The scheduler ends a queued job after this time.
    is_older = not isinstance(opened := records[0].typed, RunOpened) or opened.home is None
    codes = ("create.duplicate",) if is_older else ("create.duplicate", "create.late")
    for name, found in {its.id: seq for seq, its in about if its.code in codes}.items():
        gone = [seq for seq, its in about if its.code in GONE and its.id == name]
        ends = [seq for seq in (*gone, *proofs) if seq > found]
        end = next(record for record in records if record.seq == min(ends)) if ends else records[-1]
        ms = min(longest_ms, elapsed_ms(records, rental.asked, end))
        yield ExtraRental(name, ms / 1000, bool(ends))


def cost_says(rentals: Sequence[Rental]) -> str:
    """Return a phrase on what bounds the cost of these rentals, and whether the bill was read."""
    # A machine that appeared late was rented, too.
    rented = [rental for rental in rentals if rental.end != "refused" or rental.extras]
    if not rented:
        return "nothing was rented"
    if is_more_than_recorded(rentals):
        return f"unknown: more was billed than is on record; {_UNREAD}"
    if not all(rental.ended for rental in rented):
        return f"unknown: a machine is not proven gone; {_UNREAD}"
    paid = [rental for rental in rented if rental.rate or rental.extras]
    if not paid:
        return "nothing is charged for it"
    parts = [_EXTRA for rental in paid if rental.extras] + [_LIMIT for rental in paid if rental.rate_is_limit]
    parts += [_BOUNDS[rental.end_is] for rental in paid if rental.end != "refused"]
    parts.sort(key=lambda words: not words.startswith("at most"))
    parts += [_UNREAD] if any(rental.billed is None for rental in paid) else []
    return "; ".join(dict.fromkeys(parts))
