"""The journal's events: a frozen class each, with what stands under `data` of its lines (docs/JOURNAL.md).

Whoever writes a journal builds one of these, and whoever reads one gets the same (`Record.typed`). A field without a
default must be there, or the run's journal is damaged from that line on; so it is where one that bears on money is not
of its type. Any other that is not is read as if it were not there, and a key that no class has is a newer gpurun's: it
stays in the line, and is left alone. A default of None also stands for what an older gpurun did not write.

Units stand in the names: `_s` seconds, `_bytes`, `_micros` millionths of a dollar, `_wall` seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from typing_extensions import TypedDict

from gpurun.core.collected_record import FileListTold
from gpurun.core.errors import ExitCode
from gpurun.core.job_terms import terms_in
from gpurun.core.money import Micros
from gpurun.core.records import Frozen, Instance, Teardown
from gpurun.core.run_plan import Lease

Json = dict[str, Any]
Number = int | float
"""A figure as it is written: a whole one stays whole, since receipts quote it."""
EndCode = Annotated[ExitCode | int, Field(union_mode="left_to_right")]
"""An exit code; one that only a newer gpurun has is a number."""
Seconds = Annotated[int, Field(gt=-1e11, lt=1e11)] | Annotated[float, Field(gt=-1e11, lt=1e11)]
"""A time or a duration that a clock can have told."""


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
    """What a provider says of a machine, once it said a price or that it tells none."""

    rate_micros_per_hour: Micros | None

    @classmethod
    def of(cls, instance: Instance) -> SeenMachine:
        """The same instance, to be put on record."""
        return cls.model_validate(instance.model_dump(mode="json"))


class AgreedLease(Lease):
    """A lease, with how long the machine may live on once its end was asked for."""

    kill_allowance_s: int

    @classmethod
    def of(cls, lease: Lease) -> AgreedLease:
        """The same lease, to be put on record."""
        return cls.model_validate(lease.model_dump())


class FileBrought(TypedDict):
    """A file that came home, by its digest."""

    name: str
    bytes: int
    sha256: str
    kind: str
    step: int


class JournalEvent(Frozen):
    """What one line of a journal tells. Whatever its event is, a machine in it is its provider's last word of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    event: ClassVar[Event]
    instance: SeenMachine | None = None

    @model_validator(mode="before")
    @classmethod
    def _writable(cls, values: Any, info: ValidationInfo) -> Any:
        """Half a surrogate pair, from a file with an odd name, becomes a question mark: no journal can hold it."""
        if info.mode == "json" or not isinstance(values, Mapping):
            return values
        return {
            key: value.encode("utf-8", "replace").decode() if type(value) is str else value
            for key, value in values.items()
        }

    def as_data(self) -> Json:
        """What stands in the journal: every field that was given, whole."""
        given = self.model_fields_set
        return {key: value for key, value in self.model_dump(mode="json").items() if key in given}


class NewerEvent(JournalEvent):
    """An event that a newer gpurun wrote: of that only a machine is understood."""


class RunOpened(JournalEvent):
    """The run begins. What an older gpurun did not write yet is None, and tells its age.

    `rules` are those by which its receipt follows from it; None are the first. `endpoint` was asked in place of the
    provider's own address, `challenge` made the seed. `job` is a kind of job that neither trains a recipe nor runs a
    command. `imported` is what a notebook told of itself. `legs`: on how many machines it may be, one after the other,
    where it continues on another one when one is taken away or lost; 0 where it does not.
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
        """Whether what runs trains a model whose recipe is known here."""
        return terms_in(self.as_data()).has_model


class StageIntended(JournalEvent):
    """What is worth a place in the bucket is put there before anything is rented."""

    event = Event.STAGE_INTENDED
    url: str = ""
    files: int | None = None
    bytes: int | None = None


class StageObserved(JournalEvent):
    """It lies there; `there_*` did before."""

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
    """A machine is going to be asked for: on disk before the request leaves, with all that money is reckoned by.

    `account` is a mark of whose key asks, `deadline_wall` by this machine's clock. `offer` is as it was approved.
    `spent_micros`: what earlier askings have cost of the same sum, where that is anything. `sends_itself`: the job may
    send what nobody here counts. `hold_s`: how long it may be held for what is not at home.
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
    """The machine exists; `adopted`: found by its token after an answer was lost."""

    event = Event.CREATE_OBSERVED
    token: str
    instance: SeenMachine
    adopted: bool = False


class CreateRefused(JournalEvent):
    """Certainly nothing was made."""

    event = Event.CREATE_REFUSED
    token: str = ""
    reason: str
    message: str


class CreateUnknown(JournalEvent):
    """Something may have been made: it is looked for by its token."""

    event = Event.CREATE_UNKNOWN
    token: str = ""
    message: str = ""


class ReadyObserved(JournalEvent):
    """The machine answers. `facts` are its agent's own.

    `armed` is the deadline, in whole seconds, that its own timer was read back to go by; None where it has none. An
    older gpurun did not write it (0), and is believed. `sent_bytes` went there while a job waited in its queue.
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
    """Code and data are sent."""

    event = Event.SHIP_INTENDED
    files: int | None = None
    bytes: int | None = None


class ShipObserved(JournalEvent):
    """They are there, verified. `pulled_*` came from the bucket, `public_bytes` by the machine's own download."""

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
    """The trainer is started; it waits `linger_s` for a client at its end. `pushed` is its folder in the bucket."""

    event = Event.TRAIN_INTENDED
    job_sha256: str = ""
    argv: list[str] = Field(default_factory=list)
    soft_stop_wall: Number | None = None
    hard_stop_wall: Number | None = None
    linger_s: Number = 0
    pushed: str = ""


class TrainStarted(JournalEvent):
    """The trainer runs; `already`: it did before it was asked."""

    event = Event.TRAIN_STARTED
    keeper_pid: int | None = None
    started_wall: Number | None = None
    already: bool | None = None
    pushed: str = ""


class RateObserved(JournalEvent):
    """What the first steps showed. `needed_micros`: the worst case of a lease that would finish, where this does not.

    `tokens_per_s` is None of a command, whose tokens nobody knows; `limit_s` is what lease and cap leave.
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
    """The work ended: "done", "stopped", "failed" or "lost". `drained_s` of fetching followed, which is collecting."""

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
    """Somebody, or the lease, wants it to stop; `signal` is the name of the one that asked."""

    event = Event.STOP_REQUESTED
    how: Literal["save", "now", "destroy"]
    by: str
    reason: str = ""
    signal: str = ""


class CollectIntended(JournalEvent):
    """What is finished is brought home."""

    event = Event.COLLECT_INTENDED


class FilesBrought(JournalEvent):
    """What is at home, and the names of what was wanted and did not come; of very many the first (`listed`)."""

    files: list[FileBrought]
    missing: list[str]
    listed: FileListTold | None = None
    missing_files: FileListTold | None = None
    latest: Any
    best: Any
    seconds: Number | None = None


class CollectObserved(FilesBrought):
    """It is at home; `remembered`: of a machine that is lost, by the last list that came home.

    `left` are names that nobody needed, `unpublished` what the machine could not list, which is missing too.
    `left_bytes` are all that left the machine, `egress_micros` what that costs, where its provider charges for it.
    """

    event = Event.COLLECT_OBSERVED
    left: list[str] = Field(default_factory=list)
    missing_bytes: int | None = None
    unpublished: Json | None = None
    left_bytes: int | None = None
    egress_micros: int | None = None
    remembered: bool = False


class SalvageObserved(FilesBrought):
    """The same of what a machine that is gone had left; `shared` says what became of its folder on a cluster."""

    event = Event.SALVAGE_OBSERVED
    brought: int | None = None
    shared: str | None = None


class HoldIntended(JournalEvent):
    """The machine is held until then for what is not at home; `elsewhere` counts what no collect brings."""

    event = Event.HOLD_INTENDED
    until_wall: Number
    message: str
    files: int | None = None
    bytes: int | None = None
    first: list[str] = Field(default_factory=list)
    elsewhere: int | None = None


class HoldObserved(JournalEvent):
    """It is held no longer: all came ("home"), its time is "over", or it runs no more ("gone")."""

    event = Event.HOLD_OBSERVED
    how: str
    seconds: Number | None = None


class DestroyIntended(JournalEvent):
    """The machine's end is asked for; `timer`: its provider ends it at a time limit of its own, whatever happens."""

    event = Event.DESTROY_INTENDED
    id: str = ""
    token: str = ""
    reason: str = ""
    timer: bool = False


class DestroyAsked(JournalEvent):
    """It was asked for; `taken`: by somebody. An older gpurun did not write that."""

    event = Event.DESTROY_ASKED
    id: str = ""
    attempt: int = 1
    answer: str = ""
    taken: bool = True


class DeathRead(JournalEvent):
    """One reading of the machine. `ended_wall` and `ran_s` are its provider's; the others count back from here.

    `alive_s_ago`: shown alive last; `up_s_ago`: as one that was not ending; `gone_s_ago`: gone without a break since.
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
        """Whether it says when the machine was alive; an older gpurun did not, and reckoned up to the proof."""
        return "alive_s_ago" in self.model_fields_set


class DeathProven(JournalEvent):
    """The machine is gone, by so many readings over so many seconds."""

    event = Event.DEATH_PROVEN
    id: str
    teardown: Teardown
    reads: int
    spread_s: Number
    evidence_sha256: str


class BillObserved(JournalEvent):
    """What its provider billed for a machine, by readings that gave the same amount."""

    event = Event.BILL_OBSERVED
    token: str
    id: str = ""
    micros: int
    reads: int
    spread_s: Seconds


class SalvageIntended(JournalEvent):
    """What a machine that is gone has left is looked for in that folder; "" where only what is here is counted."""

    event = Event.SALVAGE_INTENDED
    folder: str = ""


class StepFailed(JournalEvent):
    """A step failed, and what to do about it."""

    event = Event.STEP_FAILED
    step: str
    code: str
    message: str
    hint: str = ""
    exit_code: EndCode


class Incident(JournalEvent):
    """Something that should not have happened and was dealt with; some codes have a class of their own, with more.

    `token` and `id` are of the machine that it is about, `billed` says that something beside one costs on.
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
        """The same, with the code of one that has a class of its own."""
        return {"code": self.code, **super().as_data()}


class PriceRose(Incident):
    """The provider tells a dearer rate of a machine that runs, from then on."""

    code: str = "price.rose"
    rate_micros_per_hour: int
    since_wall: Seconds


class MachineEndsItself(Incident):
    """The machine was told over SSH to end itself, and does so then."""

    code: str = "machine.ends_itself"
    ends_wall: Seconds


class AddressChanged(Incident):
    """The machine runs at another address."""

    code: str = "machine.moved"
    instance: SeenMachine


class ExtraGone(Incident):
    """A machine beside the run's own, or one that came late, is proven gone."""

    id: str


class MachineGone(Incident):
    """The provider has shown the machine as gone for so long while it was waited for."""

    code: str = "machine.gone"
    gone_s_ago: Seconds


class LegPlanned(JournalEvent):
    """The run continues on another machine: on the offers of that plan, from a checkpoint that is at home.

    `token`, `provider` and `region` are of the machine that was lost, `why` is how it ended, in the provider's words;
    they are empty where none was lost since the last plan, and only its offers could not be had. `files` are the
    checkpoint of `step`; there are none where it starts again. `fruitless`: so many machines in a row brought no new
    checkpoint. `spent_micros` is what all machines until now cost at most. `events_bytes` and `log_bytes` are how much
    of the copies here is of earlier machines; `reached` is the last step that those tell of.
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
    left_micros: int
    events_bytes: int = 0
    log_bytes: int = 0


class ReceiptObserved(JournalEvent):
    """The receipt has its place in the chain."""

    event = Event.RECEIPT_OBSERVED
    seq: int
    sha256: str


class RunClosed(JournalEvent):
    """The run is closed; the journal adds `seal`, the digest of this line without it."""

    event = Event.RUN_CLOSED
    exit_code: EndCode
    seal: str = ""


class JournalRepaired(JournalEvent):
    """A torn last line was cut."""

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
"""Fields with a default that are damage where they are not of their type."""


def class_of(event: str, data: Mapping[str, Any]) -> type[JournalEvent]:
    """Return the class of a line's event, by its code too."""
    if event == Event.INCIDENT:
        return INCIDENTS.get(str(data.get("code")), Incident)
    return CLASSES[Event(event)] if event in CLASSES else NewerEvent


def may_be_damage(event: str, data: Mapping[str, Any]) -> bool:
    """Whether a line of this event can be damage by what stands under `data`: only then it is read to find out."""
    return "instance" in data or bool(_needed(class_of(event, data)))


@cache
def _needed(kind: type[JournalEvent]) -> frozenset[str]:
    return frozenset(name for name, field in kind.model_fields.items() if field.is_required())


def read_event(event: str, data: Mapping[str, Any]) -> JournalEvent:
    """Return what a line tells, by JSON's own types: "5" is no number. ValidationError where it is not understood."""
    kind, data = class_of(event, data), as_today(event, data)
    try:
        return kind.model_validate_json(_as_text(data), strict=True)
    except ValidationError as error:
        wrong = {fault["loc"][0] if fault["loc"] else "" for fault in error.errors(include_url=False)}
        if wrong & (_OF_MONEY | _needed(kind)) or not wrong <= kind.model_fields.keys():
            raise
    return kind.model_validate_json(_as_text({key: data[key] for key in data if key not in wrong}), strict=True)


def _as_text(data: Mapping[str, Any]) -> bytes:
    """Return the data as JSON; half a surrogate pair, which no journal of ours has, is a question mark."""
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")


def as_today(event: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an older line's data as this gpurun writes them; what a default of its class says needs no word here."""
    if event == Event.DEATH_READ and "alive_s_ago" in data and "up_s_ago" not in data:
        return {**data, "up_s_ago": data["alive_s_ago"]}  # It made no difference of a machine that was ending.
    return data
