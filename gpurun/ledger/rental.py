"""One rental as the journal tells it: from the intent to create to the proof of death, in seconds and in money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.money import Micros, cost_of, times, total
from gpurun.core.progress import Event, Record
from gpurun.ledger.untrusted import plain_data


def last_of(records: Sequence[Record], event: Event) -> Record | None:
    """The last record of an event."""
    return next((record for record in reversed(records) if record.event is event), None)


def elapsed_s(records: Sequence[Record], start: Record, end: Record) -> float:
    """Seconds between two records by the widest reading of the clocks, rounded up to a millisecond.

    Wall time may be set back, and monotonic time begins anew at a boot: from each record to the next the larger counts.
    """
    between = [record for record in records if start.seq <= record.seq <= end.seq]
    passed_us = sum(after.us_since(before) for before, after in pairwise(between))
    return -(-passed_us // 1000) / 1000


@dataclass(frozen=True)
class Rental:
    """The records of one attempt, beginning with its `create.intended`."""

    records: tuple[Record, ...]

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

    @property
    def machines(self) -> int:
        """How many machines this asking made; a duplicate that was found is paid for like the one that was kept."""
        duplicates = [r for r in self.records if r.event is Event.INCIDENT and r.data["code"] == "create.duplicate"]
        return 1 + len(duplicates)

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
        return self.end != "not_proven"

    @property
    def seconds(self) -> float:
        """What may be billed: from before the asking to the proof; nothing for what was certainly not made."""
        if self.end == "refused":
            return 0.0
        return elapsed_s(self.records, self.intent, self.last(Event.DEATH_PROVEN) or self.records[-1])

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
        beside = cost_of(self._quoted("beside_micros_per_hour"), self.seconds, unit_s)
        once = self._quoted("egress_micros") if self.seconds else Micros(0)
        return times(total(cost_of(Micros(self.rate), self.seconds, unit_s), beside, once), self.machines)

    def _quoted(self, key: str) -> Micros:
        """A cost beside the rate, as the plan had it; journals of the first version have none."""
        return Micros(int(self.intent.data.get(key, 0)))

    def proof(self) -> dict[str, Any]:
        """The reads behind the end of this machine."""
        proven = self.last(Event.DEATH_PROVEN)
        keys = ("id", "reads", "spread_s", "evidence_sha256")
        return {
            "token": self.token,
            "teardown": self.end,
            **{key: plain_data(proven.data[key]) if proven else None for key in keys},
            "readings": [
                {"at": utc(read.wall), **{key: read.data[key] for key in ("state", "listed", "answer_sha256")}}
                for read in self.records
                if read.event is Event.DEATH_READ
            ],
        }


def all_bounded(rentals: Sequence[Rental]) -> bool:
    """Whether the journal bounds what was paid: each machine ended, and there is no more than it tells."""
    return all(rental.ended for rental in rentals) and not is_more(rentals)


def is_more(rentals: Sequence[Rental]) -> bool:
    """Whether more was paid than the records tell: for a machine that came late, or for what lay beside one, billed."""
    incidents = [record.data for one in rentals for record in one.records if record.event is Event.INCIDENT]
    return any(one["code"] == "create.late" or (one["code"] == "leftover" and one.get("billed")) for one in incidents)


def rentals_of(records: Sequence[Record]) -> list[Rental]:
    """The journal cut into rentals, oldest first."""
    starts = [place for place, record in enumerate(records) if record.event is Event.CREATE_INTENDED]
    return [Rental(tuple(records[start:end])) for start, end in pairwise([*starts, len(records)])]
