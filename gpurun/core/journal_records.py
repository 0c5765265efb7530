"""The records of a journal, and the state of a run that results from replaying them."""

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
    """The phases of a run, which follow from its journal."""

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
"""A time in seconds that a calendar can show, until after the year 5000, so that sums of times stay valid."""
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._]{0,63}$")]


class Record(Frozen):
    """One line of a journal. `prev` is the sha256 of the line before, byte for byte.

    An `event` that only a newer gpurun knows is a plain string: the record is kept, and changes nothing in the state.
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
        """Return the parsed `data`, which is parsed at first use; ValidationError if it is damaged."""
        return read_event(self.event, self.data)

    def us_since(self, before: Record) -> int:
        """Return the microseconds since an earlier record by the clock that advanced more; over a reboot, by `wall`."""
        ticked_us = microseconds(self.mono) - microseconds(before.mono) if self.boot_id == before.boot_id else 0
        return max(0, ticked_us, microseconds(self.wall) - microseconds(before.wall))

    def least_us_since(self, before: Record) -> int:
        """Return the microseconds since an earlier record, by the clock that advanced less; 0 across a reboot."""
        if self.boot_id != before.boot_id:
            return 0
        ticked_us = microseconds(self.mono) - microseconds(before.mono)
        return max(0, min(ticked_us, microseconds(self.wall) - microseconds(before.wall)))

    @property
    def runs_us(self) -> int | None:
        """Return the most microseconds that a queued machine had run at this record; None if no start is known."""
        machine = self.typed.instance
        if machine is None or machine.started_wall is None:
            return None
        return max(0, microseconds(self.wall) - microseconds(machine.started_wall)) + microseconds(STAMPS_S)


T = TypeVar("T", bound=JournalEvent)


def all_typed(records: Iterable[Record], kind: type[T]) -> Iterator[T]:
    """Yield the parsed contents of all records whose event has this class, in order."""
    for record in records:
        if record.event is kind.event and isinstance(typed := record.typed, kind):
            yield typed


def last_typed(records: Sequence[Record], kind: type[T]) -> T | None:
    """Return the parsed content of the last record whose event has this class; None if there is none."""
    return next(all_typed(reversed(records), kind), None)


def by_machine(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Return the records of a run in parts, each from one `leg.planned` to the next: one part for each machine."""
    moves = [place for place, record in enumerate(records) if record.event is Event.LEG_PLANNED]
    return [records[begin:end] for begin, end in pairwise([0, *moves, len(records)])]


def last_brought(records: Sequence[Record]) -> FilesBrought | None:
    """Return the last record of downloaded files, from a collect or a salvage; None if there is none."""
    homecoming = (
        record.typed for record in reversed(records) if record.event in (Event.COLLECT_OBSERVED, Event.SALVAGE_OBSERVED)
    )
    return next((record for record in homecoming if isinstance(record, FilesBrought)), None)


def opened_of(records: Sequence[Record]) -> RunOpened:
    """Return the journal's first record, which must be `run.opened`; ValueError if it is not."""
    if records and isinstance(opened := records[0].typed, RunOpened):
        return opened
    raise ValueError("its journal does not begin with run.opened")


STAMPS_S = 2.0
"""The most by which a duration from a provider's times, which are whole seconds, can be too short."""


@lru_cache(maxsize=4096)
def microseconds(seconds: float) -> int:
    """Convert seconds to microseconds in decimal arithmetic, without a binary rounding error."""
    return int((Decimal(str(seconds)) * 1_000_000).to_integral_value(ROUND_HALF_EVEN))


class Moment(Frozen):
    """A point in time by both clocks of this computer."""

    wall: float
    mono: float
    boot_id: str

    @classmethod
    def from_record(cls, record: Record) -> Moment:
        """Return the time at which a record was written."""
        return cls(wall=record.wall, mono=record.mono, boot_id=record.boot_id)

    def seconds_until(self, later: Moment) -> float:
        """Return the seconds until a later moment, by the clock that advanced more; never below zero."""
        ticked_s = later.mono - self.mono if later.boot_id == self.boot_id else 0.0
        return max(0.0, ticked_s, later.wall - self.wall)


class CreateAttempt(Frozen):
    """One request for a machine: its price per hour, the price of what comes with it (disk, address), and its outcome.

    `answer` is "" until the outcome is known, then "made" or "refused"; "unseen" if the reply was lost and no machine
    was found. `spent_micros` is what earlier attempts have cost of the same cap. `leg` is the number of the run's leg
    that requested the machine.
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
    """A machine with a token of the run that is not the run's own; `ended` is None until its end is proven."""

    token: str
    ended: Moment | None = None


class Dearer(Frozen):
    """A higher price of the run's machine from `since_wall` on, without the price of what comes with the machine."""

    micros_per_hour: Micros
    since_wall: float


class RunState(Frozen):
    """The state of a run that results from replaying its journal. An unset field is "", 0, None or empty.

    The request: `account` identifies the account at the provider. `attempts` has every create attempt by token.
    `passed_over` counts the offers that were unavailable: the next attempt uses the next approved offer. `requested_at`
    is when the machine was requested; `heard_at` is when the last reply about that arrived, so the request may have
    been sent as late as that. `moves_on` is a message: the machine was shown as gone before it was ready, and if that
    is proven soon, the next offer is used.

    The machine: `timer_shares_key` means that its timer uses the key that requested it (None: not recorded). `armed`
    means that its timer was read back; for an older journal that is assumed. `ends_wall` is when it ends itself, if it
    was ordered to do so before its deadline. `clock_ahead_s` is how far its clock is ahead of this computer's, if that
    is more than a reply takes. `moved` means that its address has changed since it was created, `was_gone` that the
    last recorded reading shows it as gone. `dearer` has the prices to which it rose while it ran. `extras` are the
    other machines that were found with a token of the run, by id (the token is "" in an older journal). `leftover` has
    the tokens of machines that left something behind that is billed.

    The work: `stage` is "wanted" until the upload to the bucket is complete, then "done"; "" without a bucket.
    `start_asked` means that the trainer may run, whether or not a reply to its start arrived. `hard_stop_wall` is its
    latest end by the machine's clock. `rated` means that its speed is on record. `silent_since_wall` is when the job
    last wrote something, if that is long ago and it still runs. `linger_s` is how long the machine waits for a client
    after the trainer's end before it ends itself, if the checkpoints are in the bucket; 0 if it stays until its
    deadline.

    The files: `pushed` is the folder in the bucket to which the machine pushes its checkpoints, until all of them are
    known to be at home. `shared` is the state of the folder that a job on a cluster shares with the login node:
    "empty", "holds" (files that may not be at home), or "kept" (those files did not come home). `elsewhere` counts the
    results outside of the folders that are downloaded; `unpublished` describes files that the machine could not list,
    with the keys `files`, `bytes` and `first`. `hold_s` is the longest time that the machine is held for files that are
    not at home, 0 if its end destroys no file. The hold began at `held_at` and ends at `hold_until_wall`; `hold_why` is
    its reason.

    The end: `stop` is how strong a stop was requested, `signal` the signal behind that request. `earlier` is the
    failure that came before the failure of the collect step. `limited` means that the machine's place limits how long a
    job may run, and that no cap ends it earlier; `overdue` that only this limit requested the `stop`; `cancelled` that
    the user ended the machine outside of gpurun.

    The legs of a run that may continue on other machines: `legs` is the maximum number of machines, one after the other
    (0: the run never continues on another), `leg` the number of the current one. `leg_plan` is the file of its plan
    below the run's folder ("" for the first), written at `leg_at`; `leg_step` is the checkpoint from which it started.
    `fruitless` is how many legs in a row before it brought no new checkpoint, `attempts_before` how many create
    attempts there were before it. `events_before` and `log_before` are the bytes of the local events file and log that
    came from earlier machines. `stays` means that gpurun has checked whether the run can continue on another machine,
    and it cannot.

    The journal: `newer` is its first event that this gpurun does not know; such a run rents nothing.
    `unread` means that the journal is damaged, and that a line after the damage may have requested a machine.
    `imported` means that the run was in a notebook that gpurun could not watch: no machine was ever requested.
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
        """Return how strong a stop the user requested; "" if none, or if only the time limit of the place did."""
        return "" if self.overdue else self.stop

    @property
    def late(self) -> dict[str, str]:
        """Return the extra machines that are not proven gone, with their tokens."""
        return {name: extra.token for name, extra in self.extras.items() if extra.ended is None}

    @property
    def may_be_billing(self) -> bool:
        """Return whether a machine or a leftover may be billed: it is not proven gone, or damage may hide a machine."""
        was_requested = bool(self.token) and self.phase not in (Phase.OPENED, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
        return was_requested or self.unread or bool(self.late or self.leftover)
