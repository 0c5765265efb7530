"""How far a run has come: the journal's records, and the state that replaying them gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from enum import StrEnum
from functools import cached_property, lru_cache
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
    """How far a run has come, as its journal tells it."""

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
"""The reasons of `create.refused` after which the next attempt is on the next approved offer."""


ClockTime = Annotated[float, Field(gt=-1e11, lt=1e11)]
"""What a clock can have shown, until beyond the year 5000: every sum of such can be told and compared."""
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._]{0,63}$")]


class Record(Frozen):
    """One line of a journal. `prev` is the sha256 of the line before, byte for byte.

    `event` is a plain word where a newer gpurun wrote what this one does not know: it is kept, and changes nothing.
    """

    seq: int
    prev: str
    wall: ClockTime
    mono: ClockTime
    boot_id: str
    event: Annotated[Event | Word, Field(union_mode="left_to_right")]
    data: dict[str, Any]
    """As it stands in the line; what it tells is `typed`."""

    @cached_property
    def typed(self) -> JournalEvent:
        """What the line tells, read when it is first asked for; ValidationError where it is not understood."""
        return read_event(self.event, self.data)

    def us_since(self, before: Record) -> int:
        """Microseconds since the record before: by wall time, or the monotonic one within a boot if that is more."""
        ticked_us = microseconds(self.mono) - microseconds(before.mono) if self.boot_id == before.boot_id else 0
        return max(0, ticked_us, microseconds(self.wall) - microseconds(before.wall))

    def least_us_since(self, before: Record) -> int:
        """Microseconds since the record before, by the clock that went less far; none from one boot to the next."""
        if self.boot_id != before.boot_id:
            return 0
        ticked_us = microseconds(self.mono) - microseconds(before.mono)
        return max(0, min(ticked_us, microseconds(self.wall) - microseconds(before.wall)))

    @property
    def runs_us(self) -> int | None:
        """For how many microseconds at most a machine that queued has run by then; None where that is not told."""
        machine = self.typed.instance
        if machine is None or machine.started_wall is None:
            return None
        return max(0, microseconds(self.wall) - microseconds(machine.started_wall)) + microseconds(STAMPS_S)


T = TypeVar("T", bound=JournalEvent)


def all_typed(records: Iterable[Record], kind: type[T]) -> Iterator[T]:
    """Return what the records of a class tell, in their order."""
    for record in records:
        if record.event is kind.event and isinstance(typed := record.typed, kind):
            yield typed


def last_typed(records: Sequence[Record], kind: type[T]) -> T | None:
    """Return what the last record of a class tells; None where there is none."""
    return next(all_typed(reversed(records), kind), None)


def last_brought(records: Sequence[Record]) -> FilesBrought | None:
    """Return what is on record as brought home, by a collect or after the machine's end; None before there was any."""
    homecoming = (
        one.typed for one in reversed(records) if one.event in (Event.COLLECT_OBSERVED, Event.SALVAGE_OBSERVED)
    )
    return next((one for one in homecoming if isinstance(one, FilesBrought)), None)


def opened_of(records: Sequence[Record]) -> RunOpened:
    """Return what a run was opened with: its journal's first record. ValueError where that is another."""
    if records and isinstance(opened := records[0].typed, RunOpened):
        return opened
    raise ValueError("its journal does not begin with run.opened")


STAMPS_S = 2.0
"""What a provider's own times, in whole seconds, may leave out at both ends."""


@lru_cache(maxsize=4096)
def microseconds(seconds: float) -> int:
    """Read a number of seconds to the microsecond, exactly as it is written."""
    return int((Decimal(str(seconds)) * 1_000_000).to_integral_value(ROUND_HALF_EVEN))


class Moment(Frozen):
    """When something was written down, by both clocks of this machine."""

    wall: float
    mono: float
    boot_id: str

    @classmethod
    def of(cls, record: Record) -> Moment:
        """When a record was written."""
        return cls(wall=record.wall, mono=record.mono, boot_id=record.boot_id)

    def seconds_until(self, later: Moment) -> float:
        """Seconds from this to a later moment, by whichever clock says more; never below zero."""
        ticked_s = later.mono - self.mono if later.boot_id == self.boot_id else 0.0
        return max(0.0, ticked_s, later.wall - self.wall)


class CreateAttempt(Frozen):
    """One asking for a machine: what it costs an hour, what else beside it (disk, address), and what became of it.

    `answer` is "" until there was one, then "made" or "refused"; "unseen" where it was lost, and nothing was found.
    `spent_micros` is what the askings before it have cost of the same sum.
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
    """The price of the run's machine as its provider tells it, without what is beside it, from `since_wall` on."""

    micros_per_hour: Micros
    since_wall: float


class RunState(Frozen):
    """A run's journal, replayed: where it is, what exists, what failed.

    `account` is the mark of the account that was asked, where its provider has accounts.
    `passed_over` counts the offers that could not be had: the next attempt is on the next one that was approved.
    `asked_at` is when the machine was asked for, `heard_at` when the last word about that came: the request may have
    left so late.
    `extras` are the machines that were found beside the run's own, by id (a token of "" is an old journal's); `asked`
    has every asking, by token; `dearer` are the prices that its machine rose to while it ran. `leftover` has the tokens
    beside whose machine something is billed.
    `shared` tells of the folder that a job on a cluster shares with its login node: "empty", "holds" what may not be
    here, or "kept" where that did not come home; "" elsewhere.
    `stage` is "wanted" until what is shipped lies in the bucket, then "done"; "" where no bucket was named. `pushed` is
    the folder of the bucket that the machine pushes its checkpoints to, until all of them are known to be here.
    `clock_ahead_s` is how far the machine's clock is ahead of this one's, where that is more than talking takes.
    `start_asked` says that the trainer may run, whether an answer to its start was heard or not, and `hard_stop_wall`
    until when by the machine's clock. `linger_s` is for how long after that the machine waits for a client where its
    checkpoints are in the bucket, before it ends itself; 0 where it stays to its deadline.
    `timer_shares_key` says whether that timer asks with the key that asked for the machine (None: it is not on record).
    `armed` says that the machine's own timer was read back (an old journal does not say, and is believed); `ends_wall`
    is when the machine ends itself, where that was brought forward by it.
    `newer` is the first event that this gpurun does not know: nothing is rented on what it may have meant.
    `unread`: the journal is damaged, and what follows the damage asked for a machine.
    `moved`: the machine runs at another address than it had at first.
    `imported`: it ran in a notebook that nothing here could see, and nothing was ever asked for.
    `silent_since_wall` is when its job wrote last, while that is long ago and it runs.
    `hold_s` is for how long at most the machine is held for what is not at home, 0 where its end takes nothing away;
    `elsewhere` counts the results that no collect brings, `unpublished` has `files`, `bytes` and the `first` of those
    that the machine could not list.
    `held_at` is when the hold began, `hold_until_wall` until when it lasts, `hold_why` what it is for; `earlier` is the
    failure from before the one of the collect step.
    `moves_on` says in words that the machine was shown as gone before it was ready: once that is proven, and not much
    later, the next offer is taken. `rated` says that the measured rate is on record, `was_gone` that the last reading
    of the machine which is on record shows it as gone. `signal` names the signal that asked for the `stop`, if one did.
    `legs`: on how many machines it may be one after the other (0: on one, whatever becomes of it), `leg` is the number
    of this one. `leg_plan` is the file of its plan below the run's folder ("" for the first), `leg_at` when that was
    written, `leg_step` the checkpoint that it started from, `fruitless` how many legs before it brought no new one,
    `attempts_before` how many askings there were, `events_before` and `log_before` how many bytes of the copies here
    are of earlier machines. `stays`: it was looked into whether it can continue on another machine, and it cannot.
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
    asked_at: Moment | None = None
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
    asked: dict[str, CreateAttempt] = Field(default_factory=dict)
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

    @property
    def late(self) -> dict[str, str]:
        """The extra machines that are not proven gone, with their tokens."""
        return {name: extra.token for name, extra in self.extras.items() if extra.ended is None}

    @property
    def may_be_billing(self) -> bool:
        """Something was asked for and is not proven gone, or what it left is billed, or nobody can read whether."""
        asked = bool(self.token) and self.phase not in (Phase.OPENED, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
        return asked or self.unread or bool(self.late or self.leftover)
