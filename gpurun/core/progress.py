"""How far a run has come: the journal's records, and the state that replaying them gives."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from gpurun.core.model import Frozen, Instance, Teardown


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
    DESTROYING = "destroying"
    GONE = "gone"
    SETTLED = "settled"
    CLOSED = "closed"


class Event(StrEnum):
    """The journal's event names (docs/JOURNAL.md); frozen by a test."""

    RUN_OPENED = "run.opened"
    STAGE_INTENDED = "stage.intended"
    STAGE_OBSERVED = "stage.observed"
    CREATE_INTENDED = "create.intended"
    CREATE_OBSERVED = "create.observed"
    CREATE_REFUSED = "create.refused"
    CREATE_UNKNOWN = "create.unknown"
    READY_OBSERVED = "ready.observed"
    SHIP_INTENDED = "ship.intended"
    SHIP_OBSERVED = "ship.observed"
    TRAIN_INTENDED = "train.intended"
    TRAIN_STARTED = "train.started"
    RATE_OBSERVED = "rate.observed"
    TRAIN_OBSERVED = "train.observed"
    STOP_REQUESTED = "stop.requested"
    COLLECT_INTENDED = "collect.intended"
    COLLECT_OBSERVED = "collect.observed"
    DESTROY_INTENDED = "destroy.intended"
    DESTROY_ASKED = "destroy.asked"
    DEATH_READ = "death.read"
    DEATH_PROVEN = "death.proven"
    SALVAGE_INTENDED = "salvage.intended"
    SALVAGE_OBSERVED = "salvage.observed"
    STEP_FAILED = "step.failed"
    INCIDENT = "incident"
    RECEIPT_OBSERVED = "receipt.observed"
    RUN_CLOSED = "run.closed"
    JOURNAL_REPAIRED = "journal.repaired"


PASSES_OVER = frozenset({"no_capacity", "offer_rejected"})
"""The reasons of `create.refused` after which the next attempt is on the next approved offer."""


class Record(Frozen):
    """One line of a journal. `prev` is the sha256 of the line before, byte for byte."""

    seq: int
    prev: str
    wall: float
    mono: float
    boot_id: str
    event: Event
    data: dict[str, Any]

    def us_since(self, before: Record) -> int:
        """Microseconds since the record before: by wall time, or the monotonic one within a boot if that is more."""
        ticked_us = _microseconds(self.mono) - _microseconds(before.mono) if self.boot_id == before.boot_id else 0
        return max(0, ticked_us, _microseconds(self.wall) - _microseconds(before.wall))


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


class RunState(Frozen):
    """A run's journal, replayed: where it is, what exists, what failed.

    `account` is the mark of the account that was asked, where its provider has accounts.
    `passed_over` counts the offers that could not be had: the next attempt is on the next one that was approved.
    `heard_wall` and `heard_mono` are when the last word about the asking came: the request may have left so late.
    `late` has each machine that showed itself only after its absence had been believed, with its token ("" in journals
    that do not tell it), until it is proven gone. `leftover` has the tokens beside whose machine something is billed.
    `stage` is "wanted" until what is shipped lies in the bucket, then "done"; "" where no bucket was named. `pushed` is
    the folder of the bucket that the machine pushes its checkpoints to, until all of them are known to be here.
    `clock_ahead_s` is how far the machine's clock is ahead of this one's, where that is more than talking takes.
    `start_asked` says that the trainer may run, whether an answer to its start was heard or not.
    `rated` says that the measured rate is on record.
    """

    run: str
    phase: Phase
    attempt: int = 0
    passed_over: int = 0
    token: str = ""
    provider: str = ""
    account: str = ""
    instance: Instance | None = None
    facts: dict[str, Any] = Field(default_factory=dict)
    stage: str = ""
    pushed: str = ""
    clock_ahead_s: float = 0.0
    start_asked: bool = False
    rated: bool = False
    deadline_wall: float | None = None
    create_wall: float | None = None
    create_mono: float = 0.0
    create_boot_id: str = ""
    heard_wall: float = 0.0
    heard_mono: float = 0.0
    heard_boot_id: str = ""
    outcome: str = ""
    reason: str = ""
    stop: str = ""
    failure: dict[str, Any] | None = None
    teardown: Teardown | None = None
    late: dict[str, str] = Field(default_factory=dict)
    leftover: tuple[str, ...] = ()
    exit_code: int | None = None

    @property
    def may_be_billing(self) -> bool:
        """Something was asked for and is not proven gone, or what it left is billed."""
        asked = bool(self.token) and self.phase not in (Phase.OPENED, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
        return asked or bool(self.late or self.leftover)
