"""How long one rental was billed as the journal tells it: from before its asking to its end, and what that rests on.

Seconds are reckoned in whole milliseconds, as docs/RECEIPTS.md says under "How seconds are rounded".
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
"""A machine was watched to its end if it showed itself alive so long before the first reading that says it is gone."""
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
    """The last record of an event."""
    return next((record for record in reversed(records) if record.event is event), None)


def elapsed_ms(records: Sequence[Record], start: Record, end: Record) -> int:
    """Milliseconds between two records by the widest reading of the clocks, rounded up.

    Wall time may be set back, and monotonic time begins again at a boot: from record to record the larger counts.
    """
    between = [record for record in records if start.seq <= record.seq <= end.seq]
    passed_us = sum(after.us_since(before) for before, after in pairwise(between))
    return -(-passed_us // 1000)


def elapsed_s(records: Sequence[Record], start: Record, end: Record) -> float:
    """The same in seconds."""
    return elapsed_ms(records, start, end) / 1000


def nearest_ms(us: int) -> int:
    """A duration that was told or planned, to the nearest millisecond."""
    return round(us / 1000)


def _ago_ms(ago_s: float | None, unknown_ms: int) -> int:
    """How long before a record something was, as the record tells it."""
    return unknown_ms if ago_s is None else nearest_ms(microseconds(ago_s))


@dataclass(frozen=True)
class BilledTime:
    """The records of one attempt, beginning with its `create.intended`, and the time that they bound.

    `billed` is what its provider billed for its machine, once two readings of that agreed.
    """

    records: tuple[Record, ...]
    billed: Micros | None = None

    @property
    def asked(self) -> Record:
        """The record before the request."""
        return self.records[0]

    @cached_property
    def intent(self) -> CreateIntended:
        """What was going to be asked for."""
        intent = self.asked.typed
        assert isinstance(intent, CreateIntended)
        return intent

    @property
    def token(self) -> str:
        """The name under which it was asked for."""
        return self.intent.token

    def last(self, event: Event) -> Record | None:
        """The last record of an event in this rental."""
        return last_of(self.records, event)

    @property
    def instance(self) -> SeenMachine | None:
        """What the provider last said of the machine; None when it was never seen."""
        return self._answers[-1] if self._answers else None

    @property
    def machine_id(self) -> str:
        """The id of its machine; "" where none was seen."""
        return self.instance.id if self.instance else ""

    @cached_property
    def _answers(self) -> list[SeenMachine]:
        """Everything that the provider said of the machine, in order."""
        told = (record.typed.instance for record in self.records if "instance" in record.data)
        return [one for one in told if one is not None]

    def told(self, key: str) -> Any:
        """What the provider last said of one property of the machine; None where it never did."""
        return next((value for one in reversed(self._answers) if (value := getattr(one, key))), None)

    @cached_property
    def end(self) -> str:
        """`refused` (nothing was made), a teardown that was proven, or `not_proven`."""
        if self.last(Event.CREATE_REFUSED) is not None:
            return "refused"
        proof = last_typed(self.records, DeathProven)
        return str(proof.teardown) if proof else "not_proven"

    @property
    def seconds(self) -> float:
        """What may be billed of the machine itself; nothing for what was certainly not made."""
        return 0.0 if self.end == "refused" else self._span[0] / 1000

    @property
    def least_seconds(self) -> float:
        """What is certainly billed of it: as long as it was seen to run, or as its provider tells."""
        if self.end == "refused":
            return 0.0
        ms, why = self._span
        told_ms = ms - _STAMPS_MS if why == REPORTED else ms if why == BY_BILL else 0
        return max(0, told_ms, 0 if self.is_queued else self._seen_ms()) / 1000

    def _seen_ms(self) -> int:
        """Return how long it was seen to run, by the clock that went less far: one that was set lengthens no life.

        What a record has was seen after the record before it: this machine may have slept until it was written. One
        that is ending is not counted as running, since not every provider bills that.
        """
        signs = [one.seq for one in self.records if one.seq < self.last_paid.seq and self._shows_life(one)]
        if not signs:
            return 0
        passed = accumulate((after.least_us_since(before) for before, after in pairwise(self.records)), initial=0)
        at_us = dict(zip((one.seq for one in self.records), passed, strict=True))
        seen_us, read = at_us[signs[-1] - 1], self.last_paid.typed
        if isinstance(read, DeathRead) and read.up_s_ago is not None:
            seen_us = max(seen_us, at_us[self.last_paid.seq - 1] - microseconds(read.up_s_ago))
        return (seen_us - at_us[signs[0]]) // 1000

    @property
    def is_queued(self) -> bool:
        """Whether it had to queue, so that its time counts from its start."""
        return self.longest_ms is not None

    @property
    def begun(self) -> bool:
        """Whether its time counts: at once, or once it is known that its wait in a queue is over."""
        return not self.is_queued or self._waited_ms is not None

    @property
    def end_is(self) -> str | None:
        """What the end of the billed time rests on; None where nothing ended, or an old gpurun did not tell."""
        return None if self.end in ("refused", "not_proven") else self._span[1]

    def ms_until(self, record: Record) -> int:
        """Milliseconds from its asking to a record, as `elapsed_ms` has them."""
        return -(-self._passed_us[record.seq] // 1000)

    @cached_property
    def _passed_us(self) -> dict[int, int]:
        passed = accumulate((after.us_since(before) for before, after in pairwise(self.records)), initial=0)
        return dict(zip((one.seq for one in self.records), passed, strict=True))

    @cached_property
    def last_paid(self) -> Record:
        """The record until which it was paid at most: the first of the readings that prove its end."""
        proven = self.last(Event.DEATH_PROVEN)
        if proven is None:
            return self.records[-1]
        proof = proven.typed
        count = max(1, proof.reads) if isinstance(proof, DeathProven) else 1
        reads = [one for one in self.records if one.event is Event.DEATH_READ and one.seq < proven.seq]
        first = next(iter(reads[-count:]), proven)
        return first if isinstance(first.typed, DeathRead) and first.typed.tells_life else proven

    @property
    def longest_ms(self) -> int | None:
        """The longest that a machine may run which had to queue, as its scheduler ends it; None without a queue."""
        lease = self.intent.lease
        return 1000 * (lease.total_s + lease.kill_allowance_s) if lease.queue_s else None

    @cached_property
    def _waited_ms(self) -> int | None:
        """How long it waited in a queue, by the earliest start that was told; None where none was."""
        told = [(one, one.runs_us) for one in self.records if one.seq <= self.last_paid.seq]
        waits = [self.ms_until(one) - nearest_ms(us) for one, us in told if us is not None]
        return max(0, min(waits)) if waits else None

    @property
    def queued_s(self) -> float:
        """The seconds from its asking to its start, which cost nothing; 0 without a queue, or where none was told."""
        return self._queued_ms / 1000

    @property
    def _queued_ms(self) -> int:
        return (self._waited_ms or 0) if self.is_queued else 0

    @cached_property
    def _span(self) -> tuple[int, str | None]:
        """From before the asking, or from the start of what had to queue, to the end; and what that end rests on.

        The first reading that shows it gone bounds it always. The provider's own times, its bill and its own time limit
        may bound it closer; none of them counts against what was seen of the machine.
        """
        gone = self.last_paid
        gone_ms, read = self.ms_until(gone), gone.typed
        if not isinstance(read, DeathRead):
            return (max(0, gone_ms - self._queued_ms) if self.begun else 0), None
        signs = [one for one in self.records if one.seq < gone.seq and self._shows_life(one)]
        sign_ms = self.ms_until(signs[-1]) if signs else 0
        born_ms = self.ms_until(signs[0]) if signs else 0
        alive_ms = max(sign_ms, gone_ms - _ago_ms(read.alive_s_ago, gone_ms))
        # What is ending is shown, and may cost nothing by its provider's own time of the end.
        up_ms = max(sign_ms, gone_ms - _ago_ms(read.up_s_ago, gone_ms))
        first_ms = self._first_gone_ms(gone.seq, gone_ms - _ago_ms(read.gone_s_ago, 0))
        lived_us = self._lived_us(read)
        if first_ms < alive_ms or (lived_us is not None and first_ms < nearest_ms(lived_us) - _STAMPS_MS):
            first_ms = gone_ms  # It was denied, not gone: it showed itself since, or its provider tells a later end.
        is_watched = first_ms - alive_ms <= 1000 * WATCHED_S
        ends: list[tuple[int, str | None]] = [(first_ms, MEASURED if is_watched else UNSEEN)]
        if self.longest_ms is not None:
            # A start that nobody was told of contradicts nothing: then what was seen alive may have been in the queue.
            ends += self._ends_of_queued(read.ran_s, self.longest_ms, *((alive_ms, up_ms) if self.begun else (0, 0)))
            ms, why = min(ends, key=lambda end: end[0])
            return max(0, ms - self._queued_ms), why
        if lived_us is not None:
            told_ms = nearest_ms(lived_us + microseconds(STAMPS_S))
            ends += [(told_ms, REPORTED)] if told_ms >= up_ms - born_ms else []
        hourly = total(Micros(self.rate), Micros(self.intent.beside_micros_per_hour))
        if self.billed is not None and hourly:
            paid_ms = 1000 * seconds_paid(self.billed, hourly)
            ends += [(paid_ms, BY_BILL)] if paid_ms >= alive_ms - born_ms else []
        ending = list(all_typed(self.records, DestroyIntended))
        # A provider that did not answer an earlier request may not have kept its time limit either.
        if len(ending) == 1 and ending[0].timer:
            lease_us = microseconds(self.intent.deadline_wall) - microseconds(self.asked.wall)
            timer_ms = nearest_ms(lease_us + microseconds(self.intent.lease.kill_allowance_s))
            ends += [(timer_ms, BY_TIMER)] if timer_ms >= alive_ms else []
        ms, why = min(ends, key=lambda end: end[0])
        return max(1, ms), why  # What was made costs the least that is billed, however soon it was gone.

    def _lived_us(self, read: DeathRead) -> int | None:
        """Return how long it lived by its provider's own times, in microseconds; None where these are not told."""
        created = [one.created_wall for one in self._answers if one.created_wall is not None]
        if not created or read.ended_wall is None or self.is_queued:
            return None
        return microseconds(read.ended_wall) - min(map(microseconds, created))

    def _first_gone_ms(self, seq: int, begun_ms: int) -> int:
        """When the unbroken row of readings begins that say GONE, up to that line, in milliseconds from the asking.

        It is broken where the machine showed itself, and where nobody looked for two minutes: one reading may be wrong.
        """
        first_ms = begun_ms
        for record in reversed([one for one in self.records if one.seq < seq]):
            if self._shows_life(record):
                break
            if record.event in (Event.INCIDENT, Event.DEATH_READ) and isinstance(
                shown := record.typed, MachineGone | DeathRead
            ):
                ms = self.ms_until(record)
                if begun_ms - ms > 1000 * WATCHED_S:
                    break
                begun_ms = ms - _ago_ms(shown.gone_s_ago, 0)
                first_ms = min(first_ms, begun_ms)
        return first_ms

    def _ends_of_queued(
        self, ran_s: float | None, longest_ms: int, alive_ms: int, up_ms: int
    ) -> Iterator[tuple[int, str | None]]:
        """Bounds of one that had to queue, from the asking: its provider's word of how long it ran, and its time limit.

        Where nobody told that it had begun, they bound it in any case.
        """
        if ran_s is not None:
            ran_ms = nearest_ms(microseconds(ran_s) + (microseconds(STAMPS_S) if ran_s else 0))
            if self._queued_ms + ran_ms >= up_ms:
                yield self._queued_ms + ran_ms, REPORTED
        asked = sum(one.event is Event.DESTROY_INTENDED for one in self.records)
        if (alive_ms == 0 or asked == 1) and self._queued_ms + longest_ms >= alive_ms:
            yield self._queued_ms + longest_ms, BY_TIMER

    def _shows_life(self, record: Record) -> bool:
        """Whether the machine, or its provider, was heard to say that it lives.

        What had to queue leaves its folder behind, which is read when it is long over: only its scheduler tells of it.
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
        """Whether the provider itself told a price for this machine."""
        return self._told_rate() is not None

    @property
    def rate(self) -> int:
        """The hourly rate: what the provider reports for the machine, else what was agreed to."""
        told = self._told_rate()
        return self.intent.rate_micros_per_hour if told is None else told

    def _told_rate(self) -> int | None:
        """The highest rate that the provider ever reported for it."""
        told = [one.rate_micros_per_hour for one in self._answers if one.rate_micros_per_hour is not None]
        return max(told, default=None)
