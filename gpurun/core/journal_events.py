"""The journal's events: a frozen class each, for the content of `data` in its lines (docs/JOURNAL.md).

A writer of a journal builds one of these, and a reader gets the same object (`Record.typed`). A required field that is
missing damages the journal from that line on; so does a field that concerns money and has the wrong type. Any other
field of a wrong type is treated as missing. A key that no class has was written by a newer gpurun: it stays in the
line and is ignored. A default of None also stands for what an older gpurun did not write.

Names contain units: `_s` seconds, `_bytes`, `_micros` millionths of a dollar, `_wall` seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from typing_extensions import TypedDict

from gpurun.core.collected_record import FileListDigest
from gpurun.core.errors import ExitCode
from gpurun.core.job_terms import terms_in
from gpurun.core.money import Micros
from gpurun.core.records import Frozen, Instance, Teardown
from gpurun.core.run_plan import Lease

Json = dict[str, Any]
Number = int | float
"""A figure as it was written: an integer stays an integer, because receipts quote it."""
EndCode = Annotated[ExitCode | int, Field(union_mode="left_to_right")]
"""An exit code; a code that only a newer gpurun has is a plain number."""
Seconds = Annotated[int, Field(gt=-1e11, lt=1e11)] | Annotated[float, Field(gt=-1e11, lt=1e11)]
"""A time or a duration within the range of a clock."""


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
    HOLD_INTENDED = "hold.intended"
    HOLD_OBSERVED = "hold.observed"
    DESTROY_INTENDED = "destroy.intended"
    DESTROY_ASKED = "destroy.asked"
    DEATH_READ = "death.read"
    DEATH_PROVEN = "death.proven"
    BILL_OBSERVED = "bill.observed"
    SALVAGE_INTENDED = "salvage.intended"
    SALVAGE_OBSERVED = "salvage.observed"
    STEP_FAILED = "step.failed"
    INCIDENT = "incident"
    LEG_PLANNED = "leg.planned"
    RECEIPT_OBSERVED = "receipt.observed"
    RUN_CLOSED = "run.closed"
    JOURNAL_REPAIRED = "journal.repaired"


class SeenMachine(Instance):
    """A provider's description of a machine, after it has reported a price or that it has none."""

    rate_micros_per_hour: Micros | None

    @classmethod
    def from_instance(cls, instance: Instance) -> SeenMachine:
        """Return the same instance in the form for the journal."""
        return cls.model_validate(instance.model_dump(mode="json"))


class AgreedLease(Lease):
    """A lease, with how long the machine may still live after its end was requested."""

    kill_allowance_s: int

    @classmethod
    def from_lease(cls, lease: Lease) -> AgreedLease:
        """Return the same lease in the form for the journal."""
        return cls.model_validate(lease.model_dump())


class FileBrought(TypedDict):
    """A file that came home, with its digest."""

    name: str
    bytes: int
    sha256: str
    kind: str
    step: int


class JournalEvent(Frozen):
    """The content of one journal line. A machine in any event is the provider's latest description of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    event: ClassVar[Event]
    instance: SeenMachine | None = None

    @model_validator(mode="before")
    @classmethod
    def _writable(cls, values: Any, info: ValidationInfo) -> Any:
        """Replace half a surrogate pair (from a file with an odd name) by "?", because a journal cannot hold it."""
        if info.mode == "json" or not isinstance(values, Mapping):
            return values
        return {
            key: value.encode("utf-8", "replace").decode() if type(value) is str else value
            for key, value in values.items()
        }

    def as_data(self) -> Json:
        """Return the data for the journal: every field that was given."""
        given = self.model_fields_set
        return {key: value for key, value in self.model_dump(mode="json").items() if key in given}


class NewerEvent(JournalEvent):
    """An event that a newer gpurun wrote: only a machine in it is understood."""


class RunOpened(JournalEvent):
    """The run begins. A field that an older gpurun did not write yet is None.

    `rules` is the version of the rules by which its receipt is made; None is the first. `endpoint` was used instead of
    the provider's own address, `challenge` gave the seed. `job` is a kind of job that neither trains a recipe nor runs
    a command. `imported` is what a notebook reported about itself. `legs`: on how many machines the run may be, one
    after the other, if it continues on another one when one is taken away or lost; 0 if it does not.
    """

    event = Event.RUN_OPENED
    run: str
    home: str | None = None
    machine: str = ""
    endpoint: str | None = None
    rules: Annotated[int, Field(ge=1)] | None = None
    mode: str
    recipe: str
    form: str
    recipe_sha256: str
    request_sha256: str
    plan_sha256: str
    data_sha256: str
    core_bundle_sha256: str = ""
    bundle_sha256: str
    trainer: str | None = None
    gpurun_version: str
    platform: Any = "unknown"
    provider: str
    cap_micros: int | None
    max_gpu_hours: Number | None = None
    pass_env: list[str] = Field(default_factory=list)
    worst_micros: int
    stage: str = ""
    challenge: str | None = None
    continues: Json | None = None
    command: Json | None = None
    job: str = ""
    imported: Any = None
    legs: Annotated[int, Field(ge=0)] = 0

    @property
    def has_model(self) -> bool:
        """Return whether the job trains a model whose recipe is known here."""
        return terms_in(self.as_data()).has_model


class StageIntended(JournalEvent):
    """The files that are worth it are put into the bucket before anything is rented."""

    event = Event.STAGE_INTENDED
    url: str = ""
    files: int | None = None
    bytes: int | None = None


class StageObserved(JournalEvent):
    """The files are in the bucket; `there_*` were there before."""

    event = Event.STAGE_OBSERVED
    url: str | None = None
    endpoint: str = ""
    files: int | None = None
    bytes: int | None = None
    there_files: int | None = None
    there_bytes: int | None = None
    sent_bytes: int | None = None
    seconds: Number | None = None


class CreateIntended(JournalEvent):
    """A create request is about to be sent: on disk before the request, with every figure that its cost depends on.

    `account` identifies whose key is used, `deadline_wall` is by this machine's clock, `offer` is as it was approved.
    `spent_micros`: what earlier attempts have cost of the same cap, if anything. `sends_itself`: the job may send data
    that gpurun does not count. `hold_s`: how long the machine may be held for files that are not at home.
    """

    event = Event.CREATE_INTENDED
    attempt: int
    token: str
    provider: str
    account: str = ""
    offer: Json
    rate_micros_per_hour: int
    beside_micros_per_hour: int = 0
    egress_micros: int = 0
    sends_itself: bool = False
    billing_unit_s: int
    least_billed_s: Seconds = 0
    worst_micros: int
    spent_micros: int = 0
    lease: AgreedLease
    hold_s: Number = 0
    timer_shares_key: bool | None = None
    deadline_wall: Seconds


class CreateObserved(JournalEvent):
    """The machine exists; `adopted`: it was found by its token after the reply was lost."""

    event = Event.CREATE_OBSERVED
    token: str
    instance: SeenMachine
    adopted: bool = False


class CreateRefused(JournalEvent):
    """Nothing was created, with certainty."""

    event = Event.CREATE_REFUSED
    token: str = ""
    reason: str
    message: str


class CreateUnknown(JournalEvent):
    """A machine may have been created: gpurun looks for its token."""

    event = Event.CREATE_UNKNOWN
    token: str = ""
    message: str = ""


class ReadyObserved(JournalEvent):
    """The machine answers. `facts` are reported by its agent.

    `armed` is the deadline, in whole seconds, that was read back from the machine's own timer; None if it has no timer.
    An older gpurun did not write it (0), and is trusted. `sent_bytes` were sent while a job waited in its queue.
    """

    event = Event.READY_OBSERVED
    id: str = ""
    instance: SeenMachine
    facts: Json
    network: Json | None = None
    not_passed: list[str] = Field(default_factory=list)
    armed: Number | None = 0
    seconds: Number | None = None
    connect_s: Number | None = None
    setup_s: Number | None = None
    sent_bytes: int = 0


class ShipIntended(JournalEvent):
    """The upload of code and data begins."""

    event = Event.SHIP_INTENDED
    files: int | None = None
    bytes: int | None = None


class ShipObserved(JournalEvent):
    """Code and data are there, verified. `pulled_*` came from the bucket, `public_bytes` by its own download."""

    event = Event.SHIP_OBSERVED
    manifest_sha256: str
    files: int | None = None
    bytes: int | None = None
    sent_bytes: int | None = None
    seconds: Number | None = None
    unpack_s: Number | None = None
    pulled_files: int | None = None
    pulled_bytes: int | None = None
    public: str | None = None
    public_bytes: int | None = None


class TrainIntended(JournalEvent):
    """The start of the trainer will be requested.

    After the trainer's end the machine waits `linger_s` seconds for a client. `pushed` is its folder in the bucket.
    """

    event = Event.TRAIN_INTENDED
    job_sha256: str = ""
    argv: list[str] = Field(default_factory=list)
    soft_stop_wall: Number | None = None
    hard_stop_wall: Number | None = None
    linger_s: Number = 0
    pushed: str = ""


class TrainStarted(JournalEvent):
    """The trainer runs; `already`: it was running before the start request."""

    event = Event.TRAIN_STARTED
    keeper_pid: int | None = None
    started_wall: Number | None = None
    already: bool | None = None
    pushed: str = ""


class RateObserved(JournalEvent):
    """What the first steps showed. `needed_micros`: the worst case of a lease that would finish, if this one does not.

    `tokens_per_s` is None for a command, whose tokens are unknown; `limit_s` is the time that lease and cap leave.
    """

    event = Event.RATE_OBSERVED
    step: int | None = None
    steps: int | None = None
    step_s: Number | None = None
    tokens_per_s: Number | None = None
    elapsed_s: Number | None = None
    left_s: Number | None = None
    limit_s: Number | None = None
    finishes: bool | None = None
    ends_at_step: int | None = None
    expected_micros: int | None = None
    cap_micros: int | None = None
    needed_micros: int | None = None
    memory_peak_bytes: int | None = None


class TrainObserved(JournalEvent):
    """The work ended: "done", "stopped", "failed" or "lost". Downloads took `drained_s` more, counted as collecting."""

    event = Event.TRAIN_OBSERVED
    outcome: str
    reason: str
    exit_code: int | None
    message: str
    ended_wall: Number | None = None
    drained_s: Number | None = None
    gpu_tally: Json | None = None
    sessions: Json | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    oom_kills: int | None = None
    outputs: Json | None = None


class StopRequested(JournalEvent):
    """The user or the lease requests a stop; `signal` names the signal that requested it, if one did."""

    event = Event.STOP_REQUESTED
    how: Literal["save", "now", "destroy"]
    by: str
    reason: str = ""
    signal: str = ""


class CollectIntended(JournalEvent):
    """The download of finished files begins."""

    event = Event.COLLECT_INTENDED


class FilesBrought(JournalEvent):
    """The files at home, and the names of expected files that are missing; only the first of very many (`listed`)."""

    files: list[FileBrought]
    missing: list[str]
    listed: FileListDigest | None = None
    missing_files: FileListDigest | None = None
    latest: Any
    best: Any
    seconds: Number | None = None


class CollectObserved(FilesBrought):
    """The files are at home; `remembered`: the machine is lost, and its last list that came home is used.

    `left` are names of unneeded files, `unpublished` are files that the machine could not list, which are missing too.
    `left_bytes` is all that left the machine, `egress_micros` the cost of that, if its provider charges for it.
    """

    event = Event.COLLECT_OBSERVED
    left: list[str] = Field(default_factory=list)
    missing_bytes: int | None = None
    unpublished: Json | None = None
    left_bytes: int | None = None
    egress_micros: int | None = None
    remembered: bool = False


class SalvageObserved(FilesBrought):
    """The same for the files of a machine that is gone; `shared` is the state of its folder on a cluster."""

    event = Event.SALVAGE_OBSERVED
    brought: int | None = None
    shared: str | None = None


class HoldIntended(JournalEvent):
    """The machine is held until then for files that are not at home; `elsewhere` counts those no collect brings."""

    event = Event.HOLD_INTENDED
    until_wall: Number
    message: str
    files: int | None = None
    bytes: int | None = None
    first: list[str] = Field(default_factory=list)
    elsewhere: int | None = None


class HoldObserved(JournalEvent):
    """The hold is over: all files came ("home"), its time is "over", or the machine no longer runs ("gone")."""

    event = Event.HOLD_OBSERVED
    how: str
    seconds: Number | None = None


class DestroyIntended(JournalEvent):
    """The destroy request is about to be sent; `timer`: the provider ends the machine at a time limit in any case."""

    event = Event.DESTROY_INTENDED
    id: str = ""
    token: str = ""
    reason: str = ""
    timer: bool = False


class DestroyAsked(JournalEvent):
    """The destroy request was sent; `taken`: it was accepted. An older gpurun did not write that."""

    event = Event.DESTROY_ASKED
    id: str = ""
    attempt: int = 1
    answer: str = ""
    taken: bool = True


class DeathRead(JournalEvent):
    """One reading of the machine. `ended_wall` and `ran_s` are the provider's; the other times count back from now.

    `alive_s_ago`: last shown alive; `up_s_ago`: last shown alive and not ending; `gone_s_ago`: gone without a break
    since.
    """

    event = Event.DEATH_READ
    id: str = ""
    at_s: Number | None = None
    state: str
    listed: bool
    answer_sha256: str
    ended_wall: Seconds | None = None
    ran_s: Seconds | None = None
    alive_s_ago: Seconds | None = None
    up_s_ago: Seconds | None = None
    gone_s_ago: Seconds | None = None

    @property
    def tells_life(self) -> bool:
        """Return whether it records when the machine was alive; an older gpurun did not, and billed up to the proof."""
        return "alive_s_ago" in self.model_fields_set


class DeathProven(JournalEvent):
    """The machine is gone, by this many readings over this many seconds."""

    event = Event.DEATH_PROVEN
    id: str
    teardown: Teardown
    reads: int
    spread_s: Number
    evidence_sha256: str


class BillObserved(JournalEvent):
    """What the provider billed for a machine, from readings that gave the same amount."""

    event = Event.BILL_OBSERVED
    token: str
    id: str = ""
    micros: int
    reads: int
    spread_s: Seconds


class SalvageIntended(JournalEvent):
    """The files of a machine that is gone are looked for in that folder; "" if only the files here are counted."""

    event = Event.SALVAGE_INTENDED
    folder: str = ""


class StepFailed(JournalEvent):
    """A step failed, with what to do about it."""

    event = Event.STEP_FAILED
    step: str
    code: str
    message: str
    hint: str = ""
    exit_code: EndCode


class Incident(JournalEvent):
    """Something unexpected happened and was handled; some codes have a class of their own, with more fields.

    `token` and `id` are those of the machine concerned; `billed` means that something beside a machine still costs
    money.
    """

    event = Event.INCIDENT
    code: str
    message: str
    id: str = ""
    token: str = ""
    billed: bool = False
    since_wall: Number | None = None
    at_s: Number | None = None

    def as_data(self) -> Json:
        """Return the data with the code, for a class that stands for one code."""
        return {"code": self.code, **super().as_data()}


class PriceRose(Incident):
    """The provider reports a higher price for a running machine, from that time on."""

    code: str = "price.rose"
    rate_micros_per_hour: int
    since_wall: Seconds


class MachineEndsItself(Incident):
    """The machine was ordered over SSH to end itself, and ends at that time."""

    code: str = "machine.ends_itself"
    ends_wall: Seconds


class AddressChanged(Incident):
    """The machine now has another address."""

    code: str = "machine.moved"
    instance: SeenMachine


class ExtraGone(Incident):
    """A machine beside the run's own, or one that appeared late, is proven gone."""

    id: str


class MachineGone(Incident):
    """The provider has shown the machine as gone for this long while gpurun waited for it."""

    code: str = "machine.gone"
    gone_s_ago: Seconds


class LegPlanned(JournalEvent):
    """The run continues on another machine: on the offers of that plan, from a checkpoint that is at home.

    `token`, `provider` and `region` belong to the lost machine, `why` is how it ended, in the provider's words. They
    are empty if no machine was lost since the last plan, and only its offers were unavailable. `files` are the
    checkpoint of `step`; there are none if the run starts from the beginning. `fruitless`: how many machines in a row
    brought no new checkpoint. `spent_micros` is the upper bound of the cost of all machines so far, `left_micros` the
    rest of the cap, `left_gpu_hours` that of a cap in GPU-hours. `events_bytes` and `log_bytes` are how much of the
    copies here came from earlier machines; `reached` is the last step in them.
    """

    event = Event.LEG_PLANNED
    number: int
    plan: str
    plan_sha256: str
    token: str = ""
    provider: str = ""
    region: str = ""
    why: str = ""
    step: int
    reached: int = 0
    files: list[FileBrought] = Field(default_factory=list)
    fruitless: int = 0
    spent_micros: int
    left_micros: int | None = None
    left_gpu_hours: Number | None = None
    events_bytes: int = 0
    log_bytes: int = 0


class ReceiptObserved(JournalEvent):
    """The receipt is in the chain."""

    event = Event.RECEIPT_OBSERVED
    seq: int
    sha256: str


class RunClosed(JournalEvent):
    """The run is closed; the journal adds `seal`, the digest of this line without the seal."""

    event = Event.RUN_CLOSED
    exit_code: EndCode
    seal: str = ""


class JournalRepaired(JournalEvent):
    """An incomplete last line was cut off."""

    event = Event.JOURNAL_REPAIRED
    cut_bytes: int
    cut_sha256: str = ""


CLASSES: dict[Event, type[JournalEvent]] = {
    kind.event: kind
    for kind in (
        RunOpened, StageIntended, StageObserved, CreateIntended, CreateObserved, CreateRefused, CreateUnknown,
        ReadyObserved, ShipIntended, ShipObserved, TrainIntended, TrainStarted, RateObserved, TrainObserved,
        StopRequested, CollectIntended, CollectObserved, HoldIntended, HoldObserved, DestroyIntended, DestroyAsked,
        DeathRead, DeathProven, BillObserved, SalvageIntended, SalvageObserved, StepFailed, Incident, LegPlanned,
        ReceiptObserved, RunClosed, JournalRepaired,
    )
}  # fmt: skip
INCIDENTS: dict[str, type[Incident]] = {
    "price.rose": PriceRose,
    "machine.ends_itself": MachineEndsItself,
    "machine.moved": AddressChanged,
    "create.duplicate_gone": ExtraGone,
    "create.late_gone": ExtraGone,
    "machine.gone": MachineGone,
}
"""The codes that have a class of their own."""
_OF_MONEY = frozenset({
    "instance", "rules", "core_bundle_sha256", "beside_micros_per_hour", "egress_micros", "sends_itself",
    "least_billed_s", "legs", "ended_wall", "ran_s", "alive_s_ago", "up_s_ago", "gone_s_ago",
})  # fmt: skip
"""Fields with a default that count as damage if they have the wrong type."""


def class_of(event: str, data: Mapping[str, Any]) -> type[JournalEvent]:
    """Return the class for a line's event, which may depend on its code."""
    if event == Event.INCIDENT:
        return INCIDENTS.get(str(data.get("code")), Incident)
    return CLASSES[Event(event)] if event in CLASSES else NewerEvent


def may_be_damage(event: str, data: Mapping[str, Any]) -> bool:
    """Return whether `data` of this event could be damage: only then is the line parsed to find out."""
    return "instance" in data or bool(_needed(class_of(event, data)))


@cache
def _needed(kind: type[JournalEvent]) -> frozenset[str]:
    return frozenset(name for name, field in kind.model_fields.items() if field.is_required())


def read_event(event: str, data: Mapping[str, Any]) -> JournalEvent:
    """Return what a line holds, strict about JSON types ("5" is not a number); ValidationError if not understood."""
    kind, data = class_of(event, data), as_today(event, data)
    try:
        return kind.model_validate_json(_as_text(data), strict=True)
    except ValidationError as error:
        wrong = {fault["loc"][0] if fault["loc"] else "" for fault in error.errors(include_url=False)}
        if wrong & (_OF_MONEY | _needed(kind)) or not wrong <= kind.model_fields.keys():
            raise
    return kind.model_validate_json(_as_text({key: data[key] for key in data if key not in wrong}), strict=True)


def _as_text(data: Mapping[str, Any]) -> bytes:
    """Return the data as JSON; half a surrogate pair, which our journals never have, becomes a question mark."""
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")


def as_today(event: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an older line's data in today's form; fields that have a default in their class need no conversion."""
    if event == Event.DEATH_READ and "alive_s_ago" in data and "up_s_ago" not in data:
        return {**data, "up_s_ago": data["alive_s_ago"]}  # It did not distinguish a machine that was ending.
    return data
