"""One rental as the journal tells it: from the intent to create to the proof of death, in seconds and in money.

Seconds are reckoned in whole milliseconds, as docs/RECEIPTS.md says under "How seconds are rounded".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.journal_records import STAMPS_S, Event, Record, microseconds
from gpurun.core.money import SECONDS_PER_HOUR, Figure, Micros, cost_of, left_of, times, total
from gpurun.core.receipt_record import Proof
from gpurun.core.untrusted import plain_data

WATCHED_S = 120.0
"""A machine was watched to its end if it showed itself alive so long before the first reading that says it is gone."""
GONE = ("create.duplicate_gone", "create.late_gone")
MEASURED, REPORTED, UNSEEN, BY_TIMER = "measured", "provider-reported", "unseen", "its own timer"
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


def _told_ms(us: int) -> int:
    """A duration that was told or planned, to the nearest millisecond."""
    return round(us / 1000)


@dataclass(frozen=True)
class Extra:
    """A machine beside the run's own: paid for from its token's intent to its proven end, or so far."""

    id: str
    seconds: float
    ended: bool


@dataclass(frozen=True)
class Rise:
    """A price that rose while the machine ran, and for how long it was paid."""

    micros_per_hour: Micros
    more_micros_per_hour: Micros
    seconds: float


@dataclass(frozen=True)
class Rental:
    """The records of one attempt, beginning with its `create.intended`, and the extra machines of its token."""

    records: tuple[Record, ...]
    extras: tuple[Extra, ...] = ()

    @property
    def intent(self) -> Record:
        """What was going to be asked for."""
        return self.records[0]

    @property
    def token(self) -> str:
        """The name under which it was asked for."""
        return str(self.intent.data["token"])

    def last(self, event: Event) -> Record | None:
        """The last record of an event in this rental."""
        return last_of(self.records, event)

    @property
    def instance(self) -> dict[str, Any] | None:
        """What the provider last said of the machine; None when it was never seen."""
        return next((told for told in reversed(self._answers())), None)

    def _answers(self) -> list[dict[str, Any]]:
        """Everything that the provider said of the machine, in order."""
        return [record.data["instance"] for record in self.records if record.data.get("instance") is not None]

    def told(self, key: str) -> Any:
        """What the provider last said of one property of the machine; None where it never did."""
        return next((one[key] for one in reversed(self._answers()) if one.get(key)), None)

    @property
    def machines(self) -> int:
        """How many machines are paid for over the whole rental: old journals tell only that there was a duplicate."""
        incidents = [record.data for record in self.records if record.event is Event.INCIDENT]
        return 1 + len([one for one in incidents if one["code"] == "create.duplicate" and not one.get("id")])

    @property
    def end(self) -> str:
        """`refused` (nothing was made), a teardown that was proven, or `not_proven`."""
        if self.last(Event.CREATE_REFUSED) is not None:
            return "refused"
        proven = self.last(Event.DEATH_PROVEN)
        return str(proven.data["teardown"]) if proven else "not_proven"

    @property
    def ended(self) -> bool:
        """Whether it can cost nothing more."""
        return self.end != "not_proven" and all(extra.ended for extra in self.extras)

    @property
    def seconds(self) -> float:
        """What may be billed of the machine itself; nothing for what was certainly not made."""
        return 0.0 if self.end == "refused" else self._span[0] / 1000

    @property
    def is_queued(self) -> bool:
        """Whether it had to queue, so that its time counts from its start."""
        return self._longest_ms is not None

    @property
    def begun(self) -> bool:
        """Whether its time counts: at once, or once it is known that its wait in a queue is over."""
        return not self.is_queued or self._waited_ms is not None

    @property
    def gpu_hours(self) -> float:
        """Its billable hours times its GPUs; a node without any counts as one."""
        offer = self.intent.data["offer"]
        return self.seconds * int(offer["gpu_count"] or offer.get("nodes", 1)) / SECONDS_PER_HOUR

    @property
    def end_is(self) -> str | None:
        """What the end of the billed time rests on; None where nothing ended, or an old gpurun did not tell."""
        return None if self.end in ("refused", "not_proven") else self._span[1]

    @property
    def last_paid(self) -> Record:
        """The record until which it was paid at most: the first of the readings that prove its end."""
        proven = self.last(Event.DEATH_PROVEN)
        if proven is None:
            return self.records[-1]
        reads = [one for one in self.records if one.event is Event.DEATH_READ and one.seq < proven.seq]
        first = next(iter(reads[-max(1, proven.data["reads"]) :]), proven)
        return first if "found_gone" in first.data else proven  # An older gpurun reckoned up to the proof.

    @property
    def _longest_ms(self) -> int | None:
        """The longest that a machine may run which had to queue, as its scheduler ends it; None without a queue."""
        lease = self.intent.data["lease"]
        parts = ("boot_s", "setup_s", "ship_s", "train_s", "collect_s", "destroy_s", "kill_allowance_s")
        limits_us = [microseconds(lease.get(part, 0)) for part in parts]
        return _told_ms(sum(limits_us)) if lease.get("queue_s") else None

    @cached_property
    def _waited_ms(self) -> int | None:
        """How long it waited in a queue, by the earliest start that was told; None where none was."""
        told = [(one, one.runs_us) for one in self.records if one.seq <= self.last_paid.seq]
        waits = [elapsed_ms(self.records, self.intent, one) - _told_ms(us) for one, us in told if us is not None]
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

        The first reading that shows it gone bounds it always. Where it was not seen alive shortly before, its own timer
        and the provider's own times may bound it closer; neither counts against what was seen of it.
        """
        gone = self.last_paid
        gone_ms = elapsed_ms(self.records, self.intent, gone)
        if gone.event is not Event.DEATH_READ:
            return (max(0, gone_ms - self._queued_ms) if self.begun else 0), None
        signs = [one for one in self.records if one.seq < gone.seq and _shows_life(one)]
        alive_ms = elapsed_ms(self.records, self.intent, signs[-1]) if signs else 0
        if (ago_s := gone.data.get("alive_s_ago")) is not None:
            alive_ms = max(alive_ms, gone_ms - _told_ms(microseconds(ago_s)))
        is_watched = gone_ms - alive_ms <= 1000 * WATCHED_S
        ends: list[tuple[int, str | None]] = [(gone_ms, MEASURED if is_watched else UNSEEN)]
        born_ms = elapsed_ms(self.records, self.intent, signs[0]) if signs else 0
        if self._longest_ms is not None:
            # A start that nobody was told of contradicts nothing: then what was seen alive may have been in the queue.
            ends += self._ends_of_queued(gone, self._longest_ms, alive_ms if self.begun else 0)
            ms, why = min(ends, key=lambda end: end[0])
            return max(0, ms - self._queued_ms), why
        created = [one["created_wall"] for one in self._answers() if one.get("created_wall") is not None]
        if created and (ended_wall := gone.data.get("ended_wall")) is not None:
            lived_us = microseconds(ended_wall) - min(map(microseconds, created))
            told_ms = _told_ms(lived_us + microseconds(STAMPS_S))
            ends += [(told_ms, REPORTED)] if told_ms >= alive_ms - born_ms else []
        intents = [one for one in self.records if one.event is Event.DESTROY_INTENDED]
        # A provider that did not answer an earlier request may not have answered its timer either.
        if len(intents) == 1 and intents[0].data.get("timer") and gone.data.get("found_gone"):
            lease_us = microseconds(self.intent.data["deadline_wall"]) - microseconds(self.intent.wall)
            timer_ms = _told_ms(lease_us + microseconds(self.intent.data["lease"]["kill_allowance_s"]))
            ends += [(timer_ms, BY_TIMER)] if timer_ms >= alive_ms else []
        return min(ends, key=lambda end: end[0])

    def _ends_of_queued(self, gone: Record, longest_ms: int, alive_ms: int) -> Iterator[tuple[int, str | None]]:
        """Bounds of one that had to queue, from the asking: its provider's word of how long it ran, and its time limit.

        Where nobody told that it had begun, they bound it in any case.
        """
        ran_s = gone.data.get("ran_s")
        if ran_s is not None:
            ran_ms = _told_ms(microseconds(ran_s) + (microseconds(STAMPS_S) if ran_s else 0))
            if self._queued_ms + ran_ms >= alive_ms:
                yield self._queued_ms + ran_ms, REPORTED
        intents = [one for one in self.records if one.event is Event.DESTROY_INTENDED]
        is_limited = alive_ms == 0 or (len(intents) == 1 and gone.data.get("found_gone"))
        if is_limited and self._queued_ms + longest_ms >= alive_ms:
            yield self._queued_ms + longest_ms, BY_TIMER

    @property
    def rises(self) -> list[Rise]:
        """The prices that the provider told while it ran, each from when the one before was read last."""
        found: list[Rise] = []
        before = self.rate
        for record in self.records:
            if record.event is Event.INCIDENT and record.data["code"] == "price.rose":
                late_us = microseconds(record.wall) - microseconds(record.data["since_wall"])
                since_ms = elapsed_ms(self.records, self.intent, record) - max(0, _told_ms(late_us))
                rate = record.data["rate_micros_per_hour"]
                if rate > before:
                    ms = max(0, round(1000 * self.seconds) - max(0, since_ms))
                    found.append(Rise(Micros(rate), left_of(Micros(rate), Micros(before)), ms / 1000))
                before = max(before, rate)
        return found

    @property
    def rate_is_reported(self) -> bool:
        """Whether the provider itself told a price for this machine."""
        return self._told_rate() is not None

    @property
    def rate(self) -> int:
        """The hourly rate: what the provider reports for the machine, else what was agreed to."""
        told = self._told_rate()
        return int(self.intent.data["rate_micros_per_hour"]) if told is None else told

    def _told_rate(self) -> int | None:
        """The highest rate that the provider ever reported for it."""
        told = [one["rate_micros_per_hour"] for one in self._answers() if one["rate_micros_per_hour"] is not None]
        return max(told, default=None)

    @property
    def micros(self) -> Micros:
        """What it cost at most, or has cost so far."""
        unit_s = int(self.intent.data["billing_unit_s"])
        once = self._egress if self.seconds else Micros(0)
        rises = total(*(cost_of(rise.more_micros_per_hour, rise.seconds, unit_s) for rise in self.rises))
        own = times(total(self._lasting(self.seconds), rises, once), self.machines)
        return total(own, *(self.micros_of(extra) for extra in self.extras))

    @property
    def _egress(self) -> Micros:
        """For what left the machine: by the bytes that were counted, or as planned where nobody counted them."""
        counted = self.last(Event.COLLECT_OBSERVED)
        planned = self._quoted("egress_micros")
        return Micros(int(counted.data.get("egress_micros", planned))) if counted else planned

    def micros_of(self, extra: Extra) -> Micros:
        """What an extra machine of this asking cost, or has cost so far."""
        return self._lasting(extra.seconds)

    def _lasting(self, seconds: float) -> Micros:
        """What is paid for so long, or the least that its provider bills, at the rate and beside it."""
        unit_s, beside = int(self.intent.data["billing_unit_s"]), self._quoted("beside_micros_per_hour")
        paid_s = max(seconds, float(self.intent.data.get("least_billed_s", 0))) if seconds else 0.0
        return total(cost_of(Micros(self.rate), paid_s, unit_s), cost_of(beside, paid_s, unit_s))

    def _quoted(self, key: str) -> Micros:
        """A cost beside the rate, as the plan had it; journals of the first version have none."""
        return Micros(int(self.intent.data.get(key, 0)))

    def proof(self) -> Proof:
        """The reads behind the end of this machine."""
        proven = self.last(Event.DEATH_PROVEN)
        claimed = proven.data if proven else {}
        return {
            "token": self.token,
            "teardown": self.end,
            "id": plain_data(claimed.get("id")),
            "reads": plain_data(claimed.get("reads")),
            "spread_s": plain_data(claimed.get("spread_s")),
            "evidence_sha256": plain_data(claimed.get("evidence_sha256")),
            "readings": [
                {"at": utc(read.wall), **{key: read.data[key] for key in ("state", "listed", "answer_sha256")}}
                for read in self.records
                if read.event is Event.DEATH_READ
            ],
        }


def all_bounded(rentals: Sequence[Rental]) -> bool:
    """Whether the journal bounds what was paid: each machine ended, and there is no more than it tells."""
    return all(rental.ended for rental in rentals) and not is_more(rentals)


def figure_of(rentals: Sequence[Rental], *, is_watched: bool = False) -> Figure:
    """Return what the cost of these rentals is."""
    paid = [rental for rental in rentals if rental.rate or rental.extras]
    unended = [rental for rental in paid if not rental.ended]
    if is_more(rentals):
        return Figure.FLOOR
    if unended and is_watched:
        return Figure.SO_FAR
    if not all(rental.begun for rental in unended):  # Nobody knows whether it waits in its queue.
        return Figure.FLOOR
    is_unseen = any(rental.extras or rental.end_is in (UNSEEN, BY_TIMER) for rental in paid)
    return Figure.BOUND if unended or is_unseen else Figure.MEASURED


def is_more(rentals: Sequence[Rental]) -> bool:
    """Whether more was paid than the records tell: for what lay beside a machine, billed, or for one that came late.

    A late machine counts here where nothing tells which it was, and in journals of older gpurun.
    """
    incidents = [record.data for one in rentals for record in one.records if record.event is Event.INCIDENT]
    counted = {extra.id for one in rentals for extra in one.extras}
    late = any(one["code"] == "create.late" and one.get("id") not in counted for one in incidents)
    return late or any(one["code"] == "leftover" and one.get("billed") for one in incidents)


def rentals_of(records: Sequence[Record]) -> list[Rental]:
    """The journal cut into rentals, oldest first, each with the extra machines of its token."""
    starts = [place for place, record in enumerate(records) if record.event is Event.CREATE_INTENDED]
    cut = [tuple(records[start:end]) for start, end in pairwise([*starts, len(records)])]
    return [Rental(one, tuple(_extras_of(one, records))) for one in cut]


def _extras_of(rental: Sequence[Record], records: Sequence[Record]) -> Iterator[Extra]:
    """The extra machines of a rental's token, whenever they showed themselves: they count from its intent."""
    token = rental[0].data["token"]
    proofs = [one for one in rental if one.event is Event.DEATH_PROVEN]
    told = [one for one in records if one.event is Event.INCIDENT and one.data.get("token") == token]
    longest_ms = Rental(tuple(rental))._longest_ms or inf  # So long one may run, however long it has queued.
    codes = ("create.duplicate", "create.late") if "home" in records[0].data else ("create.duplicate",)
    for found in {one.data["id"]: one for one in told if one.data["code"] in codes and one.data.get("id")}.values():
        gone = [one for one in told if one.data["code"] in GONE and one.data["id"] == found.data["id"]]
        ends = [one for one in (*gone, *proofs) if one.seq > found.seq]
        end = min(ends, key=lambda one: one.seq) if ends else records[-1]
        ms = min(longest_ms, elapsed_ms(records, rental[0], end))
        yield Extra(str(found.data["id"]), ms / 1000, bool(ends))


def _shows_life(record: Record) -> bool:
    """Whether the machine, or its provider, was heard to say that it lives."""
    rose = record.event is Event.INCIDENT and record.data["code"] == "price.rose"
    is_word = record.data.get("outcome") not in _UNHEARD and not record.data.get("remembered")
    return rose or (record.event in _ALIVE and is_word)
