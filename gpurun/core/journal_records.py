"""How far a run has come: the journal's records, and the state that results from replaying them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import Field

from gpurun.core.journal_events import Event, FilesBrought, JournalEvent, RunOpened, StepFailed, read_event
from gpurun.core.money import Micros
from gpurun.core.records import Frozen, Instance, Teardown

__all__ = [
    "PASSES_OVER", "STAMPS_S", "CreateAttempt", "Dearer", "Event", "Extra", "Moment", "Phase", "Record", "RunState",
    "all_typed", "last_brought", "last_typed", "microseconds", "opened_of",
]  # fmt: skip


class Phase(StrEnum):
    """How far a run has come, according to its journal."""

    OPENED = "opened"
    CREATING = "creating"
    CREATED = "created"
    READY = "ready"
    SHIPPED = "shipped"
    TRAINING = "training"
    TRAINED = "trained"
    COLLECTED = "collected"
    HELD = "held"
    DESTROYING = "destroying"
    GONE = "gone"
    SETTLED = "settled"
    CLOSED = "closed"


PASSES_OVER = frozenset({"no_capacity", "offer_rejected"})
"""The reasons of `create.refused` after which the next attempt uses the next approved offer."""


ClockTime = Annotated[float, Field(gt=-1e11, lt=1e11)]
"""Times that a clock can show, until beyond the year 5000: every sum of them can be shown and compared."""
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._]{0,63}$")]


class Record(Frozen):
    """One line of a journal. `prev` is the sha256 of the line before, byte for byte.

    An `event` that only a newer gpurun knows is a plain string: it is kept, and changes nothing.
    """

    seq: int
    prev: str
    wall: ClockTime
    mono: ClockTime
    boot_id: str
    event: Annotated[Event | Word, Field(union_mode="left_to_right")]
    data: dict[str, Any]
    """The data as it stands in the line; `typed` is its parsed form."""

    @cached_property
    def typed(self) -> JournalEvent:
        """Return the parsed content of the line, parsed at first use; ValidationError if it is not understood."""
        return read_event(self.event, self.data)

    def us_since(self, before: Record) -> int:
        """Return the microseconds since the record before: wall time, or monotonic within a boot if that is more."""
        ticked_us = microseconds(self.mono) - microseconds(before.mono) if self.boot_id == before.boot_id else 0
        return max(0, ticked_us, microseconds(self.wall) - microseconds(before.wall))

    def least_us_since(self, before: Record) -> int:
        """Return the microseconds since the record before, by the clock that advanced less; 0 across a reboot."""
        if self.boot_id != before.boot_id:
            return 0
        ticked_us = microseconds(self.mono) - microseconds(before.mono)
        return max(0, min(ticked_us, microseconds(self.wall) - microseconds(before.wall)))

    @property
    def runs_us(self) -> int | None:
        """Return the most microseconds that a queued machine has run by now; None if that is not recorded."""
        machine = self.typed.instance
        if machine is None or machine.started_wall is None:
            return None
        return max(0, microseconds(self.wall) - microseconds(machine.started_wall)) + microseconds(STAMPS_S)


T = TypeVar("T", bound=JournalEvent)


def all_typed(records: Iterable[Record], kind: type[T]) -> Iterator[T]:
    """Return the contents of all records of a class, in order."""
    for record in records:
        if record.event is kind.event and isinstance(typed := record.typed, kind):
            yield typed


def last_typed(records: Sequence[Record], kind: type[T]) -> T | None:
    """Return the content of the last record of a class; None if there is none."""
    return next(all_typed(reversed(records), kind), None)


def by_machine(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Divide the records of a run at each move to another machine."""
    moves = [place for place, record in enumerate(records) if record.event is Event.LEG_PLANNED]
    return [records[begin:end] for begin, end in pairwise([0, *moves, len(records)])]


def last_brought(records: Sequence[Record]) -> FilesBrought | None:
    """Return the last recorded list of downloaded files, from a collect or a salvage; None if there is none."""
    homecoming = (
        record.typed for record in reversed(records) if record.event in (Event.COLLECT_OBSERVED, Event.SALVAGE_OBSERVED)
    )
    return next((record for record in homecoming if isinstance(record, FilesBrought)), None)


def opened_of(records: Sequence[Record]) -> RunOpened:
    """Return how a run was opened, from its journal's first record. ValueError if that is another record."""
    if records and isinstance(opened := records[0].typed, RunOpened):
        return opened
    raise ValueError("its journal does not begin with run.opened")


STAMPS_S = 2.0
"""How much a provider's own times, in whole seconds, may miss at both ends."""


@lru_cache(maxsize=4096)
def microseconds(seconds: float) -> int:
    """Convert a number of seconds to microseconds, exactly as it is written."""
    return int((Decimal(str(seconds)) * 1_000_000).to_integral_value(ROUND_HALF_EVEN))


class Moment(Frozen):
    """When something was recorded, by both clocks of this machine."""

    wall: float
    mono: float
    boot_id: str

    @classmethod
    def from_record(cls, record: Record) -> Moment:
        """Return when a record was written."""
        return cls(wall=record.wall, mono=record.mono, boot_id=record.boot_id)

    def seconds_until(self, later: Moment) -> float:
        """Return the seconds from this to a later moment, by the clock that shows more; never below zero."""
        ticked_s = later.mono - self.mono if later.boot_id == self.boot_id else 0.0
        return max(0.0, ticked_s, later.wall - self.wall)


class CreateAttempt(Frozen):
    """One request for a machine: its price per hour, the price of what comes with it (disk, address), and its outcome.

    `answer` is "" until there is one, then "made" or "refused"; "unseen" if the reply was lost and nothing was found.
    `spent_micros` is what the attempts before it have cost of the same cap.
    `leg` is the leg of the run that it was for.
    """

    token: str
    provider: str
    region: str
    micros_per_hour: Micros
    beside_micros_per_hour: Micros
    billing_unit_s: int
    worst_micros: Micros
    spent_micros: Micros
    at: Moment
    answer: str = ""
    leg: int = 1


class Extra(Frozen):
    """A machine that carries a token of the run and is not the run's machine; `ended` once its end is proven."""

    token: str
    ended: Moment | None = None


class Dearer(Frozen):
    """The price of the run's machine as its provider reports it, without what comes with it, from `since_wall` on."""

    micros_per_hour: Micros
    since_wall: float


class RunState(Frozen):
    """A run's journal, replayed: its phase, what exists, what failed.

    `account` identifies the account that was used, if its provider has accounts. `passed_over` counts the unavailable
    offers: the next attempt is on the next approved offer. `requested_at` is when the machine was requested, `heard_at`
    when the last reply about that arrived: the request may have left as late as that. `extras` are the machines that
    were found beside the run's own, by id (a token of "" is an old journal's); `attempts` has every create attempt, by
    token; `dearer` are the prices that its machine rose to while it ran. `leftover` has the tokens of machines that
    left something behind that is billed. `shared` is the state of the folder that a job on a cluster shares with its
    login node: "empty", "holds" for files that may not be here, or "kept" if those did not come home; "" elsewhere.
    `stage` is "wanted" until the upload is in the bucket, then "done"; "" without a bucket. `pushed` is the folder of
    the bucket to which the machine pushes its checkpoints, until all of them are known to be here. `clock_ahead_s` is
    how far the machine's clock is ahead of this one's, if that is more than the round trip. `start_asked` means that
    the trainer may run, whether or not a reply to its start arrived. `hard_stop_wall` is its latest end by the
    machine's clock. `linger_s` is how long the machine then waits for a client if its checkpoints are in the bucket,
    before it ends itself; 0 if it stays until its deadline. `timer_shares_key` means that the timer uses the key that
    requested the machine (None: not recorded). `armed` means that the machine's own timer was read back (an old journal
    does not say, and is trusted); `ends_wall` is when the machine ends itself, if it was ordered to do so earlier.
    `newer` is the first event that this gpurun does not know: it rents nothing while that event's meaning is unknown.
    `unread`: the journal is damaged, and a record after the damage requested a machine. `moved`: the address of the
    machine has changed since it was created. `imported`: it ran in a notebook that gpurun could not see, and no machine
    was ever requested. `silent_since_wall` is when its job wrote last, if that is long ago and it still runs. `hold_s`
    is the longest time that the machine is held for files that are not at home, 0 if its end destroys nothing;
    `elsewhere` counts the results that no collect brings, `unpublished` has `files`, `bytes` and the `first` of those
    that the machine could not list. `held_at` is when the hold began, `hold_until_wall` when it ends, `hold_why` its
    reason; `earlier` is the failure that came before the failure of the collect step. `moves_on` states that the
    machine was shown as gone before it was ready: if that is proven soon, the next offer is used. `rated` means that
    the measured speed is on record, `was_gone` that the last recorded reading of the machine shows it as gone. `signal`
    names the signal that requested the `stop`, if one did. `legs`: on how many machines it may run, one after the other
    (0: on one, whatever happens to it); `leg` is the number of this one. `leg_plan` is the file of its plan below the
    run's folder ("" for the first), `leg_at` when that was written, `leg_step` the checkpoint that it started from,
    `fruitless` how many legs before it brought no new one, `attempts_before` how many create attempts there were before
    it, `events_before` and `log_before` how many bytes of the copies here came from earlier machines. `stays`: gpurun
    checked whether it can continue on another machine, and it cannot. `limited`: the place of its machine limits how
    long a job may take, and no cap ends it earlier; `overdue`: that time is over, which alone requested the `stop`;
    `cancelled`: its own user ended the machine, outside of gpurun.
    """

    run: str
    phase: Phase
    attempt: int = 0
    passed_over: int = 0
    moves_on: str = ""
    token: str = ""
    provider: str = ""
    account: str = ""
    instance: Instance | None = None
    facts: dict[str, Any] = Field(default_factory=dict)
    stage: str = ""
    pushed: str = ""
    shared: str = ""
    clock_ahead_s: float = 0.0
    start_asked: bool = False
    hard_stop_wall: float | None = None
    linger_s: float = 0.0
    rated: bool = False
    was_gone: bool = False
    silent_since_wall: float | None = None
    deadline_wall: float | None = None
    timer_shares_key: bool | None = None
    armed: bool = False
    ends_wall: float | None = None
    requested_at: Moment | None = None
    heard_at: Moment | None = None
    outcome: str = ""
    reason: str = ""
    stop: str = ""
    signal: str = ""
    failure: StepFailed | None = None
    earlier: StepFailed | None = None
    hold_s: float = 0.0
    held_at: Moment | None = None
    hold_until_wall: float | None = None
    hold_why: str = ""
    elsewhere: int = 0
    unpublished: dict[str, Any] = Field(default_factory=dict)
    teardown: Teardown | None = None
    attempts: dict[str, CreateAttempt] = Field(default_factory=dict)
    extras: dict[str, Extra] = Field(default_factory=dict)
    dearer: tuple[Dearer, ...] = ()
    leftover: tuple[str, ...] = ()
    exit_code: int | None = None
    newer: str = ""
    unread: bool = False
    moved: bool = False
    imported: bool = False
    legs: int = 0
    leg: int = 1
    leg_at: Moment | None = None
    leg_plan: str = ""
    leg_plan_sha256: str = ""
    leg_step: int = 0
    fruitless: int = 0
    attempts_before: int = 0
    events_before: int = 0
    log_before: int = 0
    stays: bool = False
    limited: bool = False
    overdue: bool = False
    cancelled: bool = False

    @property
    def stop_of_user(self) -> str:
        """Return how strong a stop the user requested; "" where only the time at a place was over."""
        return "" if self.overdue else self.stop

    @property
    def late(self) -> dict[str, str]:
        """Return the extra machines that are not proven gone, with their tokens."""
        return {name: extra.token for name, extra in self.extras.items() if extra.ended is None}

    @property
    def may_be_billing(self) -> bool:
        """Return whether a machine or leftover may be billed: not proven gone, or the journal too damaged to tell."""
        was_requested = bool(self.token) and self.phase not in (Phase.OPENED, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
        return was_requested or self.unread or bool(self.late or self.leftover)
