"""Computes how long one rental was billed, from its request to its end by the journal, and the evidence for that end.

Seconds are computed in whole milliseconds, as docs/RECEIPTS.md explains under "How seconds are rounded".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from gpurun.core.journal_events import (
    CollectObserved,
    CreateIntended,
    DeathProven,
    DeathRead,
    DestroyIntended,
    Incident,
    MachineGone,
    SeenMachine,
    TrainObserved,
)
from gpurun.core.journal_records import STAMPS_S, Event, Record, all_typed, last_typed, microseconds
from gpurun.core.money import Micros, seconds_paid, total

WATCHED_S = 120.0
"""An end was watched if the last sign of life is at most this long before the first reading of the machine as gone."""
MEASURED, REPORTED, UNSEEN, BY_TIMER = "measured", "provider-reported", "unseen", "its own timer"
BY_BILL = "the provider's bill"
_ALIVE = {
    Event.CREATE_OBSERVED,
    Event.READY_OBSERVED,
    Event.SHIP_OBSERVED,
    Event.TRAIN_STARTED,
    Event.RATE_OBSERVED,
    Event.TRAIN_OBSERVED,
    Event.COLLECT_OBSERVED,
}
_UNHEARD = ("lost",)
_LIVES = ("price.rose", "death.denied", "machine.back")
_STAMPS_MS = round(1000 * STAMPS_S)


def last_of(records: Sequence[Record], event: Event) -> Record | None:
    """Return the last record of an event; None if there is none."""
    return next((record for record in reversed(records) if record.event is event), None)


def elapsed_ms(records: Sequence[Record], start: Record, end: Record) -> int:
    """Return the milliseconds between two records, rounded up. `records` contains both, and the records in between.

    From each record to the next, the clock that advanced more counts, because wall time can be set back, and monotonic
    time restarts at a boot.
    """
    between = [record for record in records if start.seq <= record.seq <= end.seq]
    passed_us = sum(after.us_since(before) for before, after in pairwise(between))
    return -(-passed_us // 1000)


def elapsed_s(records: Sequence[Record], start: Record, end: Record) -> float:
    """Return the seconds between two records; see `elapsed_ms`."""
    return elapsed_ms(records, start, end) / 1000


def nearest_ms(us: int) -> int:
    """Convert microseconds to the nearest millisecond, for durations that are reported or planned."""
    return round(us / 1000)


def _convert_ago_to_ms(ago_s: float | None, unknown_ms: int) -> int:
    """Convert a record's "seconds ago" to milliseconds; return `unknown_ms` if the record has no such time."""
    return unknown_ms if ago_s is None else nearest_ms(microseconds(ago_s))


@dataclass(frozen=True)
class BilledTime:
    """The records of one rental, from its `create.intended` on, and the billed time that follows from them.

    `billed` is the amount on the provider's bill for the machine, once two readings of the bill agreed; else None.
    """

    records: tuple[Record, ...]
    billed: Micros | None = None

    @property
    def asked(self) -> Record:
        """Return the rental's first record: the intent that was written before the request."""
        return self.records[0]

    @cached_property
    def intent(self) -> CreateIntended:
        """Return the content of the first record: the intent to create the machine."""
        intent = self.asked.typed
        assert isinstance(intent, CreateIntended)
        return intent

    @property
    def token(self) -> str:
        """Return the token of the request."""
        return self.intent.token

    def last(self, event: Event) -> Record | None:
        """Return the last record of an event in this rental; None if there is none."""
        return last_of(self.records, event)

    @property
    def instance(self) -> SeenMachine | None:
        """Return the provider's last description of the machine; None if the provider never described it."""
        return self._answers[-1] if self._answers else None

    @property
    def machine_id(self) -> str:
        """Return the id of the machine; "" if the provider never described it."""
        return self.instance.id if self.instance else ""

    @cached_property
    def _answers(self) -> list[SeenMachine]:
        """Return all of the provider's descriptions of the machine, in order."""
        seen = (record.typed.instance for record in self.records if "instance" in record.data)
        return [machine for machine in seen if machine is not None]

    def reported(self, key: str) -> Any:
        """Return the provider's last value for one field of `SeenMachine`; None if it gave none."""
        return next((value for machine in reversed(self._answers) if (value := getattr(machine, key))), None)

    @cached_property
    def end(self) -> str:
        """Return how the rental ended: "refused" (no machine was made), the proven teardown, or "not_proven"."""
        if self.last(Event.CREATE_REFUSED) is not None:
            return "refused"
        proof = last_typed(self.records, DeathProven)
        return str(proof.teardown) if proof else "not_proven"

    @property
    def seconds(self) -> float:
        """Return the most seconds that may be billed for the machine; 0 if it is certain that none was made."""
        return 0.0 if self.end == "refused" else self._billable_span[0] / 1000

    @property
    def least_seconds(self) -> float:
        """Return the seconds that are certainly billed: the time in which the machine was seen to run.

        Instead, it is the time by the provider's report or bill, if the billed time rests on that and it is longer.
        """
        if self.end == "refused":
            return 0.0
        ms, why = self._billable_span
        certain_ms = ms - _STAMPS_MS if why == REPORTED else ms if why == BY_BILL else 0
        return max(0, certain_ms, 0 if self.is_queued else self._compute_seen_ms()) / 1000

    def _compute_seen_ms(self) -> int:
        """Return for how many milliseconds the machine was certainly seen to run, from its first sign of life on.

        The clock that advanced less counts, because the other may have been changed. A sign of life counts from the
        record before it, because this computer may have slept between the two. A machine that is ending does not count
        as running, because not every provider bills that time.
        """
        signs = [
            record.seq for record in self.records if record.seq < self.last_paid.seq and self._is_sign_of_life(record)
        ]
        if not signs:
            return 0
        passed = accumulate((after.least_us_since(before) for before, after in pairwise(self.records)), initial=0)
        at_us = dict(zip((record.seq for record in self.records), passed, strict=True))
        seen_us, read = at_us[signs[-1] - 1], self.last_paid.typed
        if isinstance(read, DeathRead) and read.up_s_ago is not None:
            seen_us = max(seen_us, at_us[self.last_paid.seq - 1] - microseconds(read.up_s_ago))
        return (seen_us - at_us[signs[0]]) // 1000

    @property
    def is_queued(self) -> bool:
        """Return whether the machine is a job in a queue: then its billed time counts from its start."""
        return self.longest_ms is not None

    @property
    def begun(self) -> bool:
        """Return whether billed time has begun: always without a queue, and with a queue once a start is reported."""
        return not self.is_queued or self._waited_ms is not None

    @property
    def end_is(self) -> str | None:
        """Return the evidence for the end of the billed time, such as "measured" or "provider-reported".

        None if no end is proven, if no machine was made, or if an older gpurun did not record the evidence.
        """
        return None if self.end in ("refused", "not_proven") else self._billable_span[1]

    def ms_until(self, record: Record) -> int:
        """Return the milliseconds from the rental's first record to another of its records, as `elapsed_ms` does."""
        return -(-self._passed_us[record.seq] // 1000)

    @cached_property
    def _passed_us(self) -> dict[int, int]:
        passed = accumulate((after.us_since(before) for before, after in pairwise(self.records)), initial=0)
        return dict(zip((record.seq for record in self.records), passed, strict=True))

    @cached_property
    def last_paid(self) -> Record:
        """Return the record up to which the machine can have been billed: the first of the readings that prove its end.

        Without a proof it is the last record. An older gpurun's readings do not suffice: then it is the proof itself.
        """
        proven = self.last(Event.DEATH_PROVEN)
        if proven is None:
            return self.records[-1]
        proof = proven.typed
        count = max(1, proof.reads) if isinstance(proof, DeathProven) else 1
        reads = [record for record in self.records if record.event is Event.DEATH_READ and record.seq < proven.seq]
        first = next(iter(reads[-count:]), proven)
        return first if isinstance(first.typed, DeathRead) and first.typed.tells_life else proven

    @property
    def longest_ms(self) -> int | None:
        """Return after how many milliseconds the scheduler ends a queued job, from its start; None without a queue."""
        lease = self.intent.lease
        return 1000 * (lease.total_s + lease.kill_allowance_s) if lease.queue_s else None

    @cached_property
    def _waited_ms(self) -> int | None:
        """Return the milliseconds from request to start, by the earliest reported start; None if none was reported."""
        starts = [(record, record.runs_us) for record in self.records if record.seq <= self.last_paid.seq]
        waits = [self.ms_until(record) - nearest_ms(us) for record, us in starts if us is not None]
        return max(0, min(waits)) if waits else None

    @property
    def queued_s(self) -> float:
        """Return the seconds in a queue, which cost nothing; 0 without a queue or a reported start."""
        return self._queued_ms / 1000

    @property
    def _queued_ms(self) -> int:
        return (self._waited_ms or 0) if self.is_queued else 0

    @cached_property
    def _billable_span(self) -> tuple[int, str | None]:
        """Return the most milliseconds that may be billed, and the evidence for their end (`end_is`).

        They count from the request, or from the start of a queued job. The first reading that shows the machine gone is
        always an upper bound. The provider's times, its bill and its time limit are further upper bounds, unless a sign
        of life contradicts them. The lowest of all bounds counts.
        """
        gone = self.last_paid
        gone_ms, read = self.ms_until(gone), gone.typed
        if not isinstance(read, DeathRead):
            return (max(0, gone_ms - self._queued_ms) if self.begun else 0), None
        signs = [record for record in self.records if record.seq < gone.seq and self._is_sign_of_life(record)]
        sign_ms = self.ms_until(signs[-1]) if signs else 0
        born_ms = self.ms_until(signs[0]) if signs else 0
        alive_ms = max(sign_ms, gone_ms - _convert_ago_to_ms(read.alive_s_ago, gone_ms))
        # A machine that is ending is still visible, but by its provider's time of the end it may no longer be billed.
        up_ms = max(sign_ms, gone_ms - _convert_ago_to_ms(read.up_s_ago, gone_ms))
        first_ms = self._find_first_gone_ms(gone.seq, gone_ms - _convert_ago_to_ms(read.gone_s_ago, 0))
        lived_us = self._compute_lived_us(read)
        if first_ms < alive_ms or (lived_us is not None and first_ms < nearest_ms(lived_us) - _STAMPS_MS):
            first_ms = gone_ms  # The first reading was wrong: the machine appeared again, or its end is reported later.
        is_watched = first_ms - alive_ms <= 1000 * WATCHED_S
        ends: list[tuple[int, str | None]] = [(first_ms, MEASURED if is_watched else UNSEEN)]
        if self.longest_ms is not None:
            # If no start was reported, signs of life are no contradiction: the job may have been in the queue.
            ends += self._bound_ends_of_queued(
                read.ran_s, self.longest_ms, *((alive_ms, up_ms) if self.begun else (0, 0))
            )
            ms, why = min(ends, key=lambda end: end[0])
            return max(0, ms - self._queued_ms), why
        if lived_us is not None:
            reported_ms = nearest_ms(lived_us + microseconds(STAMPS_S))
            ends += [(reported_ms, REPORTED)] if reported_ms >= up_ms - born_ms else []
        hourly = total(Micros(self.rate), Micros(self.intent.beside_micros_per_hour))
        if self.billed is not None and hourly:
            paid_ms = 1000 * seconds_paid(self.billed, hourly)
            ends += [(paid_ms, BY_BILL)] if paid_ms >= alive_ms - born_ms else []
        ending = list(all_typed(self.records, DestroyIntended))
        # A provider that did not answer an earlier request may have missed its time limit, too.
        if len(ending) == 1 and ending[0].timer:
            lease_us = microseconds(self.intent.deadline_wall) - microseconds(self.asked.wall)
            timer_ms = nearest_ms(lease_us + microseconds(self.intent.lease.kill_allowance_s))
            ends += [(timer_ms, BY_TIMER)] if timer_ms >= alive_ms else []
        ms, why = min(ends, key=lambda end: end[0])
        return max(1, ms), why  # A machine that was made costs at least the provider's minimum, however soon it ended.

    def _compute_lived_us(self, read: DeathRead) -> int | None:
        """Return how long the machine existed by its provider's times, in microseconds; None if they are not known."""
        created = [machine.created_wall for machine in self._answers if machine.created_wall is not None]
        if not created or read.ended_wall is None or self.is_queued:
            return None
        return microseconds(read.ended_wall) - min(map(microseconds, created))

    def _find_first_gone_ms(self, seq: int, begun_ms: int) -> int:
        """Return when the series of readings as gone began that ends at line `seq`, in milliseconds from the request.

        `begun_ms` is when it began by the reading in that line. A sign of life interrupts a series, and so do more than
        two minutes without a reading, because a single reading may be wrong.
        """
        first_ms = begun_ms
        for record in reversed([record for record in self.records if record.seq < seq]):
            if self._is_sign_of_life(record):
                break
            if record.event in (Event.INCIDENT, Event.DEATH_READ) and isinstance(
                shown := record.typed, MachineGone | DeathRead
            ):
                ms = self.ms_until(record)
                if begun_ms - ms > 1000 * WATCHED_S:
                    break
                begun_ms = ms - _convert_ago_to_ms(shown.gone_s_ago, 0)
                first_ms = min(first_ms, begun_ms)
        return first_ms

    def _bound_ends_of_queued(
        self, ran_s: float | None, longest_ms: int, alive_ms: int, up_ms: int
    ) -> Iterator[tuple[int, str | None]]:
        """Yield upper bounds for the end of a queued job, in milliseconds from the request, with their evidence.

        They are the time that it ran by its provider, and its time limit. A bound that a sign of life contradicts is
        left out.
        """
        if ran_s is not None:
            ran_ms = nearest_ms(microseconds(ran_s) + (microseconds(STAMPS_S) if ran_s else 0))
            if self._queued_ms + ran_ms >= up_ms:
                yield self._queued_ms + ran_ms, REPORTED
        requests = sum(record.event is Event.DESTROY_INTENDED for record in self.records)
        if (alive_ms == 0 or requests == 1) and self._queued_ms + longest_ms >= alive_ms:
            yield self._queued_ms + longest_ms, BY_TIMER

    def _is_sign_of_life(self, record: Record) -> bool:
        """Return whether a record is a sign of life: the machine itself answered, or its provider shows it as alive.

        For a queued job only the scheduler's word counts, because the job's folder can be read long after its end.
        """
        if record.event is Event.INCIDENT:
            return isinstance(incident := record.typed, Incident) and incident.code in _LIVES
        if record.event not in _ALIVE:
            return False
        if self.intent.lease.queue_s:
            return record.typed.instance is not None
        match record.typed if record.event in (Event.TRAIN_OBSERVED, Event.COLLECT_OBSERVED) else None:
            case TrainObserved() as ended:
                return ended.outcome not in _UNHEARD
            case CollectObserved() as collected:
                return not collected.remembered
        return True

    @property
    def rate_is_reported(self) -> bool:
        """Return whether the provider itself reported a price for this machine."""
        return self._find_reported_rate() is not None

    @property
    def rate_is_limit(self) -> bool:
        """Return whether the provider reported only the most that it bills per hour."""
        return any(seen.rate_is_limit for seen in self._answers)

    @property
    def rate(self) -> int:
        """Return the machine's price per hour: the highest that the provider reported, else the agreed one."""
        reported = self._find_reported_rate()
        return self.intent.rate_micros_per_hour if reported is None else reported

    def _find_reported_rate(self) -> int | None:
        """Return the highest price per hour that the provider reported for the machine; None if it reported none."""
        reported = [seen.rate_micros_per_hour for seen in self._answers if seen.rate_micros_per_hour is not None]
        return max(reported, default=None)
