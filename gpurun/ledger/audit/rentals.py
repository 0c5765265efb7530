"""The audit's own code for the seconds, cost and end of each rental, from the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from gpurun.core.journal_events import (
    BillObserved,
    CollectObserved,
    CreateIntended,
    DeathProven,
    DeathRead,
    DestroyIntended,
    Incident,
    JournalEvent,
    MachineGone,
    PriceRose,
    RunOpened,
    SeenMachine,
    TrainObserved,
)
from gpurun.core.journal_records import Event, Record, all_typed, last_typed, opened_of
from gpurun.core.money import SECONDS_PER_HOUR, Micros, cost_of, left_of, times, total
from gpurun.core.receipt_rules import CAP_BROKEN_WHERE_SEEN
from gpurun.core.untrusted import plain_data

Json = dict[str, Any]
_ALIVE = {
    Event.CREATE_OBSERVED, Event.READY_OBSERVED, Event.SHIP_OBSERVED, Event.TRAIN_STARTED, Event.RATE_OBSERVED,
    Event.TRAIN_OBSERVED, Event.COLLECT_OBSERVED,
}  # fmt: skip
_SAID_ALIVE = {"price.rose", "death.denied", "machine.back"}
_WATCHED, _STAMPS = 120, Decimal(2)
_MICRO, _MILLI, _NONE = Decimal("0.000001"), Decimal("0.001"), Decimal(0)
T = TypeVar("T", bound=JournalEvent)


def lines_with(records: Sequence[Record], kind: type[T]) -> list[tuple[Record, T]]:
    """Return the records whose event has this class, each with its parsed content."""
    return [(record, record.typed) for record in records if isinstance(record.typed, kind)]


def _to_exact_seconds(seconds: float) -> Decimal:
    """Return a number of seconds as a decimal, exactly as it is written, to the microsecond."""
    return Decimal(str(seconds)).quantize(_MICRO)


def _round_to_milli(seconds: Decimal) -> Decimal:
    return seconds.quantize(_MILLI)


def elapsed_s(a: Record, b: Record) -> Decimal:
    """Return the seconds from a record to the next one, by the clock that advanced more; over a reboot, by `wall`."""
    ticked = _to_exact_seconds(b.mono) - _to_exact_seconds(a.mono) if a.boot_id == b.boot_id else _NONE
    return max(_NONE, ticked, _to_exact_seconds(b.wall) - _to_exact_seconds(a.wall))


def least_elapsed_s(a: Record, b: Record) -> Decimal:
    """Return the seconds from a record to the next one, by the clock that advanced less; over a reboot, 0."""
    both = (
        _to_exact_seconds(b.mono) - _to_exact_seconds(a.mono),
        _to_exact_seconds(b.wall) - _to_exact_seconds(a.wall),
    )
    return max(_NONE, min(both)) if a.boot_id == b.boot_id else _NONE


class Passed:
    """The seconds between any two records of a journal, as sums over the records in between."""

    def __init__(self, records: Sequence[Record]) -> None:
        sums = accumulate((elapsed_s(*both) for both in pairwise(records)), initial=_NONE)
        self._at = dict(zip((record.seq for record in records), sums, strict=False))

    def between(self, first: Record, last: Record) -> Decimal:
        """Return the seconds from one record to a later one, rounded up to a millisecond."""
        return (self._at[last.seq] - self._at[first.seq]).quantize(_MILLI, rounding=ROUND_CEILING)


class RecordedRise(NamedTuple):
    """A price increase: the new price, the increase, and from which second of the rental on.

    `at` is the second of the rental in which it was recorded.
    """

    rate: int
    more: Micros
    since: Decimal
    at: Decimal


@dataclass(frozen=True)
class AuditedRental:
    """One rental: the records from its create intent to the next one, and the whole journal."""

    records: Sequence[Record]
    journal: Sequence[Record]
    clock: Passed

    @cached_property
    def intent(self) -> CreateIntended:
        """Return the content of the create intent."""
        return next(all_typed(self.records, CreateIntended))

    @cached_property
    def end(self) -> str:
        """Return how the rental ended: "refused" (no machine), the proven teardown, or "not_proven"."""
        if any(record.event is Event.CREATE_REFUSED for record in self.records):
            return "refused"
        proof = last_typed(self.records, DeathProven)
        return str(proof.teardown) if proof else "not_proven"

    @cached_property
    def rate(self) -> int:
        """Return the highest price per hour that the provider reported for the machine, else the agreed one."""
        reported = [seen.rate_micros_per_hour for seen in self._answers if seen.rate_micros_per_hour is not None]
        return max(reported, default=self.intent.rate_micros_per_hour)

    @cached_property
    def has_limit(self) -> bool:
        """Return whether the provider reported only the most that it bills per hour."""
        return any(seen.rate_is_limit for seen in self._answers)

    @cached_property
    def bill(self) -> int | None:
        """Return the amount on the provider's bill; None if the bill was not read."""
        bills = [bill.micros for bill in all_typed(self.journal, BillObserved) if bill.token == self.intent.token]
        return bills[-1] if bills else None

    @cached_property
    def starts(self) -> list[Decimal]:
        """Return a queued job's reported starts, one for each record with a start, in seconds after the request."""
        starts = []
        for record in self.records:
            machine = record.typed.instance
            if machine is not None and machine.started_wall is not None and record.seq <= self._paid_until.seq:
                ago = _round_to_milli(
                    max(_NONE, _to_exact_seconds(record.wall) - _to_exact_seconds(machine.started_wall)) + _STAMPS
                )
                starts.append(max(_NONE, self._age_at(record) - ago))
        return starts

    @cached_property
    def lives(self) -> list[Decimal]:
        """Return the times of all signs of life before the end of the paid time, in seconds after the request."""
        return [
            self._age_at(record)
            for record in self.records
            if record.seq < self._paid_until.seq and self._is_sign_of_life(record)
        ]

    @cached_property
    def facts(self) -> Json:
        """Return the figures of the rental's entry in the receipt, with its cost so far if it has not ended."""
        seconds, end_is = (0.0, None) if self.end == "refused" else self._billable()
        rises, dearer = [], Micros(0)
        for rise in self.rises_from(self.rate):
            so_long = float(max(_NONE, Decimal(str(seconds)) - rise.since))
            rises.append({"rate_micros_per_hour": rise.rate, "billable_s": so_long})
            dearer = total(dearer, cost_of(rise.more, so_long, self.intent.billing_unit_s))
        doubles = [incident for incident in all_typed(self.records, Incident) if incident.code == "create.duplicate"]
        machines = 1 + sum(not double.id for double in doubles)
        extras = [{**extra, "micros": self.lasting(self.rate, extra["billable_s"])} for extra in self._list_extras()]
        once = self._compute_egress() if seconds else Micros(0)
        own = times(total(self.lasting(self.rate, seconds), dearer, once), machines)
        is_proven = any(record.event is Event.DEATH_PROVEN for record in self.records)
        optional = {"end_is": end_is if is_proven else None, "extras": extras, "price_rose": rises}
        return {
            "machines": machines,
            "billable_s": seconds,
            "rate_micros_per_hour": self.rate,
            "micros": total(own, *(extra["micros"] for extra in extras)),
            "end": self.end,
            **{key: value for key, value in optional.items() if value},
        }

    @cached_property
    def least(self) -> Micros:
        """Return the least that the rental cost, for the seconds that are certainly billed.

        They are the seconds in which the machine was seen to run or, if they are more, those by the provider's report
        or bill. The cost is 0 if the provider reported only the most that it bills per hour.
        """
        if self.end == "refused" or self.has_limit:
            return Micros(0)
        seconds, end_is = self._billable()
        certain = [_NONE]
        if end_is in ("provider-reported", "the provider's bill"):
            certain.append(Decimal(str(seconds)) - (_STAMPS if end_is == "provider-reported" else _NONE))
        until, read = self._paid_until.seq, self._paid_until.typed
        lines = [record.seq for record in self.records if record.seq < until and self._is_sign_of_life(record)]
        if lines and not self.intent.lease.queue_s:
            sums = accumulate((least_elapsed_s(*both) for both in pairwise(self.records)), initial=_NONE)
            at = dict(zip((record.seq for record in self.records), sums, strict=True))
            runs = [at[lines[-1] - 1]]  # The sign of life came after the record before it.
            if isinstance(read, DeathRead) and read.up_s_ago is not None:
                runs.append(at[until - 1] - _to_exact_seconds(read.up_s_ago))
            certain.append((max(runs) - at[lines[0]]).quantize(_MILLI, rounding=ROUND_FLOOR))
        return self.lasting(self.rate, float(max(certain)))

    @property
    def is_open(self) -> bool:
        """Return whether the rental may still cost more: a machine of it is not proven gone."""
        return self.end == "not_proven" or not all(extra["ended"] for extra in self.facts.get("extras", ()))

    def lasting(self, rate: int, seconds: float) -> Micros:
        """Return the cost of so many seconds at a price per hour, with the price of what comes with the machine."""
        paid_s = max(seconds, self.intent.least_billed_s) if seconds else 0.0
        rates = (rate, self.intent.beside_micros_per_hour)
        return total(*(cost_of(Micros(price), paid_s, self.intent.billing_unit_s) for price in rates))

    def rises_from(self, rate: int) -> Iterator[RecordedRise]:
        """Yield each increase over the highest price before it, from the price `rate` on."""
        for line, rose in lines_with(self.records, PriceRose):
            if rose.rate_micros_per_hour > rate:
                late = max(_NONE, _round_to_milli(_to_exact_seconds(line.wall) - _to_exact_seconds(rose.since_wall)))
                more = left_of(Micros(rose.rate_micros_per_hour), Micros(rate))
                rate, at = rose.rate_micros_per_hour, self._age_at(line)
                yield RecordedRise(rate, more, max(_NONE, at - late), at)

    @cached_property
    def _answers(self) -> list[SeenMachine]:
        return [record.typed.instance for record in self.records if record.typed.instance is not None]

    def _age_at(self, line: Record) -> Decimal:
        """Return the seconds from the request to a record."""
        return self.clock.between(self.records[0], line)

    @cached_property
    def _paid_until(self) -> Record:
        """Return the record at which the paid time ends at the latest: the first reading of the proof of death.

        Without a proof it is the last record. If an older gpurun made the readings, it is the proof itself.
        """
        proofs = lines_with(self.records, DeathProven)
        if not proofs:
            return self.records[-1]
        line, proof = proofs[-1]
        reads = [pair for pair in lines_with(self.records, DeathRead) if pair[0].seq < line.seq]
        counted = reads[max(0, len(reads) - max(1, proof.reads)) :]
        return counted[0][0] if counted and counted[0][1].tells_life else line

    def _billable(self) -> tuple[float, str | None]:
        """Return the most seconds that may be billed, and the evidence for their end.

        They are the lowest of the bounds that no sign of life contradicts.
        """
        read, intent = self._paid_until.typed, self.intent
        longest = self._age_at(self._paid_until)
        if not isinstance(read, DeathRead):
            since = min(self.starts, default=longest) if intent.lease.queue_s else _NONE
            return float(max(_NONE, longest - since)), None
        seen = [_NONE, *self.lives]
        born = seen[1] if len(seen) > 1 else _NONE
        agos = (read.alive_s_ago, read.up_s_ago)
        alive, up = (
            max(seen) if ago is None else max(*seen, longest - _round_to_milli(_to_exact_seconds(ago))) for ago in agos
        )
        since = self._find_gone_since()
        births = [_to_exact_seconds(answer.created_wall) for answer in self._answers if answer.created_wall is not None]
        lived = _to_exact_seconds(read.ended_wall) - min(births) if births and read.ended_wall is not None else None
        is_denied = lived is not None and not intent.lease.queue_s and since < _round_to_milli(lived) - _STAMPS
        absent = since if since >= alive and not is_denied else longest
        bounds: list[tuple[Decimal, str]] = [(absent, "measured" if absent - alive <= _WATCHED else "unseen")]
        if intent.lease.queue_s:
            return self._bound_after_queue(read.ran_s, bounds, alive, up)
        if lived is not None:
            lasted = _round_to_milli(lived + _STAMPS)
            bounds += [(lasted, "provider-reported")] if lasted >= up - born else []
        hourly = total(Micros(self.rate), Micros(intent.beside_micros_per_hour))
        if self.bill is not None and hourly:
            paid_for = (Decimal(self.bill) * 3600 / hourly).to_integral_value(rounding=ROUND_CEILING)
            bounds += [(paid_for, "the provider's bill")] if paid_for >= alive - born else []
        ending = list(all_typed(self.records, DestroyIntended))
        if len(ending) == 1 and ending[0].timer:
            until = _to_exact_seconds(intent.deadline_wall) + intent.lease.kill_allowance_s
            by_timer = _round_to_milli(until - _to_exact_seconds(self.records[0].wall))
            bounds += [(by_timer, "its own timer")] if by_timer >= alive else []
        least = min(bounds, key=lambda bound: bound[0])
        return float(max(_MILLI, least[0])), least[1]

    def _bound_after_queue(
        self, ran_s: float | None, bounds: list[tuple[Decimal, str]], alive: Decimal, up: Decimal
    ) -> tuple[float, str]:
        """Return the result of `_billable` for a queued job: its seconds from the earliest start on.

        `bounds` are the bounds so far. If no start was reported, the signs of life do not count.
        """
        start, limit = min(self.starts, default=_NONE), self._queued_limit_s
        alive, up = (alive, up) if self.starts else (_NONE, _NONE)
        if ran_s is not None:
            ran = _to_exact_seconds(ran_s)
            ended = start + _round_to_milli(ran + _STAMPS if ran else ran)
            bounds += [(ended, "provider-reported")] if ended >= up else []
        is_limited = alive <= 0 or len(list(all_typed(self.records, DestroyIntended))) == 1
        if is_limited and start + limit >= alive:
            bounds.append((start + limit, "its own timer"))
        least = min(bounds, key=lambda bound: bound[0])
        return float(max(_NONE, least[0] - start)), least[1]

    @property
    def _queued_limit_s(self) -> Decimal:
        """Return how many seconds a queued job may run after its start; infinity without a queue."""
        lease = self.intent.lease
        return (
            _round_to_milli(Decimal(lease.total_s + lease.kill_allowance_s)) if lease.queue_s else Decimal("Infinity")
        )

    def _find_gone_since(self) -> Decimal:
        """Return when the last series of readings as gone begins, in seconds after the request.

        The series ends at the end of the paid time. A sign of life, or too long a time without a reading, interrupts
        it.
        """
        since = until = None
        for record in self.records:
            if record.seq > self._paid_until.seq:
                break
            if self._is_sign_of_life(record):
                since = None
            elif isinstance(read := record.typed, DeathRead | MachineGone):
                at = self._age_at(record)
                begun = at - _round_to_milli(_to_exact_seconds(read.gone_s_ago or 0))
                is_on = since is not None and until is not None and begun - until <= _WATCHED
                since, until = (min(since, begun) if is_on and since is not None else begun), at
        return since if since is not None else _NONE

    def _is_sign_of_life(self, line: Record) -> bool:
        """Return whether a record is a sign of life; for a queued job, only the scheduler's word is one."""
        event = line.typed
        if isinstance(event, Incident):
            return event.code in _SAID_ALIVE
        if line.event not in _ALIVE:
            return False
        if self.intent.lease.queue_s:
            return event.instance is not None
        is_lost = isinstance(event, TrainObserved) and event.outcome == "lost"
        return not is_lost and not (isinstance(event, CollectObserved) and event.remembered)

    def _compute_egress(self) -> Micros:
        """Return the cost of all data that left the machine; 0 if it never answered."""
        planned, collected = self.intent.egress_micros, last_typed(self.records, CollectObserved)
        if collected is None:
            return Micros(planned if any(record.event is Event.READY_OBSERVED for record in self.records) else 0)
        sent = planned if collected.egress_micros is None else collected.egress_micros
        return Micros(max(sent, planned if self.intent.sends_itself else 0))

    def _list_extras(self) -> list[Json]:
        """Return the extra machines with the rental's token, each with its seconds and whether it is proven gone.

        The seconds count from the create intent to the proven end, or to the last record.
        """
        found, ends = dict[str, Json](), dict[str, Record]()
        kinds = {"create.duplicate"} | ({"create.late"} if _has_late_machines(self.journal) else set())
        first, last = self.records[0].seq, self.records[-1].seq
        for line in self.journal:
            event = line.typed
            if isinstance(event, Incident) and event.token == self.intent.token and event.id:
                if event.code in kinds:
                    found[event.id] = {"id": plain_data(event.id)}
                    ends.pop(event.id, None)
                elif event.code in ("create.late_gone", "create.duplicate_gone"):
                    ends.setdefault(event.id, line)
            elif isinstance(event, DeathProven) and first <= line.seq <= last:
                ends = {**dict.fromkeys(found, line), **ends}
        return [
            fact
            | {"billable_s": float(min(self._queued_limit_s, self._age_at(ends.get(name, self.journal[-1]))))}
            | {"ended": name in ends}
            for name, fact in found.items()
        ]


def _has_late_machines(records: Sequence[Record]) -> bool:
    """Return whether the journal records which machine appeared late; an older gpurun did not, and recorded no home."""
    return bool(records) and isinstance(opened := records[0].typed, RunOpened) and opened.home is not None


def split_rentals(records: Sequence[Record]) -> list[AuditedRental]:
    """Return the rentals in a journal, oldest first, each from its create intent to the next one."""
    begins = [place for place, record in enumerate(records) if record.event is Event.CREATE_INTENDED]
    clock = Passed(records)
    return [AuditedRental(records[start:end], records, clock) for start, end in pairwise([*begins, len(records)])]


def measured_micros(records: Sequence[Record]) -> Micros | None:
    """Return the most that a run has cost by its journal, up to the last record if a machine is not proven gone.

    None for a run in a notebook, because gpurun cannot see its cost.
    """
    if records and isinstance(opened := records[0].typed, RunOpened) and opened.imported:
        return None
    return total(*(rental.facts["micros"] for rental in split_rentals(records)))


def measured_gpu_hours(records: Sequence[Record]) -> float:
    """Return the most GPU-hours that a run has used by its journal: of all machines, with the extra machines."""
    spent = 0.0
    for rental in split_rentals(records):
        facts = rental.facts
        seconds = facts["machines"] * facts["billable_s"] + sum(
            extra["billable_s"] for extra in facts.get("extras", ())
        )
        spent += gpu_hours(rental.intent, seconds)
    return spent


def gpu_hours(intent: CreateIntended, seconds: float) -> float:
    """Return the GPU-hours of so many seconds of a requested machine; a node without GPUs counts as one GPU."""
    offer = intent.offer
    return seconds * int(offer.get("gpu_count") or offer.get("nodes", 1) * offer.get("jobs", 1)) / SECONDS_PER_HOUR


def is_more_than_journal_tells(records: Sequence[Record]) -> bool:
    """Return whether more was paid than the records show: for a leftover, or a late machine that is in no rental."""
    tokens = {intent.token for intent in all_typed(records, CreateIntended)} if _has_late_machines(records) else set()
    incidents = list(all_typed(records, Incident))
    late = any(
        incident.code == "create.late" and not (incident.id and incident.token in tokens) for incident in incidents
    )
    return late or any(incident.code == "leftover" and incident.billed for incident in incidents)


def money_and_death(records: Sequence[Record]) -> Json:
    """Return the part of a receipt's predicate about seconds, money and ends, as this code computes it."""
    opened, rentals = opened_of(records), split_rentals(records)
    cap = None if opened.cap_micros is None else Micros(opened.cap_micros)
    if opened.imported:
        cost: Json = {"upper_bound_micros": None, "is": "unknown", "cap_micros": cap, "cap_kept": None, "rentals": []}
        return {"runtime": {"billable_s": None}, "cost": cost, "teardown": {"is": "user_operated", "evidence": []}}
    facts = [rental.facts for rental in rentals]
    is_live = is_more_than_journal_tells(records) or any(rental.is_open for rental in rentals)
    spent = None if is_live else total(*(fact["micros"] for fact in facts))
    unseen = ("unseen", "its own timer")
    is_unseen = any(
        fact.get("extras") or (fact["rate_micros_per_hour"] and fact.get("end_is") in unseen) for fact in facts
    )
    is_unseen = is_unseen or any(rental.has_limit for rental in rentals if rental.end != "refused")
    by_bill = any(fact["rate_micros_per_hour"] and fact.get("end_is") == "the provider's bill" for fact in facts)
    figure = "bound" if is_unseen else "billed" if by_bill else "measured"
    paid = [rental for rental in rentals if rental.end != "refused" and (rental.rate or rental.facts.get("extras"))]
    bills = [rental.bill for rental in paid if rental.bill is not None and not rental.facts.get("extras")]
    has_bill = bool(paid) and not is_live and len(bills) == len(paid)
    billable = sum((Decimal(str(fact["billable_s"])) for fact in facts), _NONE)
    if cap is None or spent is None or left_of(cap, spent) >= 0:
        kept = None if cap is None or spent is None else True
    elif (opened.rules or 1) < CAP_BROKEN_WHERE_SEEN:  # By these rules, any cost over the cap broke it, except a bound.
        kept = None if is_unseen else False
    else:
        kept = False if left_of(cap, total(*(rental.least for rental in rentals))) < 0 else None
    ends = [rental.end for rental in rentals if rental.end != "refused"]
    hidden = {"billable_s": None, "micros": None}
    return {
        "runtime": {"billable_s": None if is_live else float(billable)},
        "cost": {
            "upper_bound_micros": spent,
            "is": "unknown" if is_live else figure if (opened.rules or 1) > 1 else "measured",
            "cap_micros": cap,
            "cap_kept": kept,
            "billed_micros": sum(bills) if has_bill else None,
            "billed_is": "provider-reported" if has_bill else "unknown",
            "rentals": [rental.facts | (hidden if rental.is_open else {}) for rental in rentals],
        },
        "teardown": {"is": "not_proven" if "not_proven" in ends else ends[-1] if ends else None},
    }
