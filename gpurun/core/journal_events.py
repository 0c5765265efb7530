"""The journal's events: one frozen class for each, with the fields of `data` in its lines (docs/JOURNAL.md).

A writer of a journal builds an object of such a class, and a reader gets an equal object (`Record.typed`). A required
field that is missing damages the journal from that line on; so does a field that concerns money and has the wrong type.
Any other field of a wrong type is treated as missing. A key that the class does not have was written by a newer gpurun:
it stays in the line and is ignored. A field with the default None is also None if an older gpurun did not write it.

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
"""A number in the type in which it was written: an integer stays an integer, because receipts quote it."""
EndCode = Annotated[ExitCode | int, Field(union_mode="left_to_right")]
"""An exit code; a code that only a newer gpurun knows is a plain number."""
Seconds = Annotated[int, Field(gt=-1e11, lt=1e11)] | Annotated[float, Field(gt=-1e11, lt=1e11)]
"""A time or a duration within the range of a clock."""


class Event(StrEnum):
    """The names of the journal's events (docs/JOURNAL.md). A test ensures that they do not change."""

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
    """A provider's description of a machine, in which the price is a required field; None if the provider gave none."""

    rate_micros_per_hour: Micros | None

    @classmethod
    def from_instance(cls, instance: Instance) -> SeenMachine:
        """Return the instance in the form for the journal."""
        return cls.model_validate(instance.model_dump(mode="json"))


class AgreedLease(Lease):
    """A lease in which `kill_allowance_s` is required: how long the machine may live after its deadline."""

    kill_allowance_s: int

    @classmethod
    def from_lease(cls, lease: Lease) -> AgreedLease:
        """Return the lease in the form for the journal."""
        return cls.model_validate(lease.model_dump())


class FileBrought(TypedDict):
    """A downloaded file in the journal, with its digest."""

    name: str
    bytes: int
    sha256: str
    kind: str
    step: int


class JournalEvent(Frozen):
    """The content of one journal line. In every event, `instance` is the provider's latest description of a machine."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)
    event: ClassVar[Event]
    instance: SeenMachine | None = None

    @model_validator(mode="before")
    @classmethod
    def _replace_surrogates(cls, values: Any, info: ValidationInfo) -> Any:
        """Replace half a surrogate pair, from an odd file name, by "?", because UTF-8 cannot contain it."""
        if info.mode == "json" or not isinstance(values, Mapping):
            return values
        return {
            key: value.encode("utf-8", "replace").decode() if type(value) is str else value
            for key, value in values.items()
        }

    def as_data(self) -> Json:
        """Return the data for the journal: every field that the writer has set, also to its default."""
        given = self.model_fields_set
        return {key: value for key, value in self.model_dump(mode="json").items() if key in given}


class NewerEvent(JournalEvent):
    """An event of a newer gpurun. Only its `instance` is read."""


class RunOpened(JournalEvent):
    """The run begins. A field that an older gpurun did not write yet is None.

    `rules` is the version of the rules by which the receipt is made; None means version 1. `endpoint` is an address
    that was used in place of the provider's own; "" if none was. `challenge` determines the seed. `job` is the kind of
    job, if it neither trains a recipe nor runs a command. `imported` is the report of a notebook about itself. `legs`
    is the maximum number of machines, one after the other, of a run that continues on another machine if its machine is
    taken away or lost; 0 for a run that does not continue.
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
    """The upload of the larger files to the bucket begins, before anything is rented."""

    event = Event.STAGE_INTENDED
    url: str = ""
    files: int | None = None
    bytes: int | None = None


class StageObserved(JournalEvent):
    """The files are in the bucket. `there_files` and `there_bytes` count those that had been there before."""

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
    """A create request is about to be sent. This record is on disk before that, with every figure of the cost.

    `account` identifies the owner of the key. `deadline_wall` is by this computer's clock. `offer` is the offer as it
    was approved. `beside_micros_per_hour` is the price of what comes with the machine, such as its disk. `spent_micros`
    is what earlier attempts have cost of the same cap. `sends_itself` means that the job may send data that gpurun does
    not count. `hold_s` is the longest time that the machine may be held for files that are not at home.
    `timer_shares_key` means that the machine's timer uses the key that requests the machine.
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
    """The machine exists. `adopted` means that the reply was lost, and that the machine was found by its token."""

    event = Event.CREATE_OBSERVED
    token: str
    instance: SeenMachine
    adopted: bool = False


class CreateRefused(JournalEvent):
    """It is certain that no machine was created."""

    event = Event.CREATE_REFUSED
    token: str = ""
    reason: str
    message: str


class CreateUnknown(JournalEvent):
    """It is not known whether a machine was created: gpurun looks for one with this token."""

    event = Event.CREATE_UNKNOWN
    token: str = ""
    message: str = ""


class ReadyObserved(JournalEvent):
    """The machine answers. `facts` are reported by its agent.

    `armed` is the deadline, in whole seconds, that was read back from the machine's own timer; None if it has no timer.
    An older gpurun did not write it: then it is 0, and the timer is assumed to be set. `sent_bytes` were sent while the
    job waited in its queue.
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
    """Code and data are on the machine, verified.

    `pulled_files` and `pulled_bytes` came from the bucket. `public` names the set of shards that the machine downloaded
    itself, `public_bytes` is its size.
    """

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
    """The start of the trainer is about to be requested.

    After the trainer's end, the machine waits `linger_s` seconds for a client. `pushed` is the folder in the bucket to
    which it pushes its checkpoints.
    """

    event = Event.TRAIN_INTENDED
    job_sha256: str = ""
    argv: list[str] = Field(default_factory=list)
    soft_stop_wall: Number | None = None
    hard_stop_wall: Number | None = None
    linger_s: Number = 0
    pushed: str = ""


class TrainStarted(JournalEvent):
    """The trainer runs. `already` means that it was running before this start request."""

    event = Event.TRAIN_STARTED
    keeper_pid: int | None = None
    started_wall: Number | None = None
    already: bool | None = None
    pushed: str = ""


class RateObserved(JournalEvent):
    """The speed of the first steps, and the forecast from it.

    `tokens_per_s` is None for a command, whose tokens are unknown. The training needs `left_s` more seconds, and
    `limit_s` are left for it. If it will not finish, `needed_micros` is the worst case of a lease in which it would.
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
    """The work ended: `outcome` is "done", "stopped", "failed" or "lost".

    For `drained_s` after the end, downloads were finished: this time counts as collecting.
    """

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
    """The user or the lease (`by`) requests a stop. `signal` names the signal behind the request; "" if none."""

    event = Event.STOP_REQUESTED
    how: Literal["save", "now", "destroy"]
    by: str
    reason: str = ""
    signal: str = ""


class CollectIntended(JournalEvent):
    """The download of finished files begins."""

    event = Event.COLLECT_INTENDED


class FilesBrought(JournalEvent):
    """The downloaded files, and the names of expected files that are missing.

    If there are very many, `files` and `missing` have only the first ones; `listed` and `missing_files` have the
    digests of the full lists.
    """

    files: list[FileBrought]
    missing: list[str]
    listed: FileListDigest | None = None
    missing_files: FileListDigest | None = None
    latest: Any
    best: Any
    seconds: Number | None = None


class CollectObserved(FilesBrought):
    """The download ended. `remembered` means that the machine is lost, and that its last downloaded list is used.

    `left` has the names of files that are not needed and stay on the machine. `unpublished` describes files that the
    machine could not list; they are missing as well. `left_bytes` is the amount of data that left the machine in all,
    `egress_micros` its cost, if the provider charges for it.
    """

    event = Event.COLLECT_OBSERVED
    left: list[str] = Field(default_factory=list)
    missing_bytes: int | None = None
    unpublished: Json | None = None
    left_bytes: int | None = None
    egress_micros: int | None = None
    remembered: bool = False


class SalvageObserved(FilesBrought):
    """The download of the files of a machine that is gone has ended. `shared` is the state of its folder on a cluster.

    `brought` is how many files were downloaded.
    """

    event = Event.SALVAGE_OBSERVED
    brought: int | None = None
    shared: str | None = None


class HoldIntended(JournalEvent):
    """The machine is held until `until_wall` for files that are not at home.

    `files` and `bytes` count those files, `first` has the first names. `elsewhere` counts files outside of the folders
    that are downloaded.
    """

    event = Event.HOLD_INTENDED
    until_wall: Number
    message: str
    files: int | None = None
    bytes: int | None = None
    first: list[str] = Field(default_factory=list)
    elsewhere: int | None = None


class HoldObserved(JournalEvent):
    """The hold ended: all files are at home ("home"), its time is over ("over"), or the machine stopped ("gone")."""

    event = Event.HOLD_OBSERVED
    how: str
    seconds: Number | None = None


class DestroyIntended(JournalEvent):
    """The destroy request is about to be sent. `timer`: the provider ends the machine at its time limit in any case."""

    event = Event.DESTROY_INTENDED
    id: str = ""
    token: str = ""
    reason: str = ""
    timer: bool = False


class DestroyAsked(JournalEvent):
    """The destroy request was sent. `taken` means that the provider accepted it; an older gpurun did not write it."""

    event = Event.DESTROY_ASKED
    id: str = ""
    attempt: int = 1
    answer: str = ""
    taken: bool = True


class DeathRead(JournalEvent):
    """One reading of the machine's state, after a destroy request. `ended_wall` and `ran_s` are the provider's times.

    The other times are seconds before this reading: `alive_s_ago` is when the machine was last shown alive, `up_s_ago`
    when it was last shown alive and not ending, `gone_s_ago` when the readings began that have all shown it gone.
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
        """Return whether `alive_s_ago` is recorded. An older gpurun did not: then billed time ends at the proof."""
        return "alive_s_ago" in self.model_fields_set


class DeathProven(JournalEvent):
    """The machine is gone, as `reads` readings within `spread_s` seconds prove."""

    event = Event.DEATH_PROVEN
    id: str
    teardown: Teardown
    reads: int
    spread_s: Number
    evidence_sha256: str


class BillObserved(JournalEvent):
    """The amount that the provider billed for a machine: `reads` readings within `spread_s` seconds gave it."""

    event = Event.BILL_OBSERVED
    token: str
    id: str = ""
    micros: int
    reads: int
    spread_s: Seconds


class SalvageIntended(JournalEvent):
    """A search for the files of a machine that is gone begins in `folder`; "" if only the files at home are counted."""

    event = Event.SALVAGE_INTENDED
    folder: str = ""


class StepFailed(JournalEvent):
    """A step failed. `hint` says what to do about it."""

    event = Event.STEP_FAILED
    step: str
    code: str
    message: str
    hint: str = ""
    exit_code: EndCode


class Incident(JournalEvent):
    """Something unexpected happened and was handled. Some codes have a class of their own, with more fields.

    `token` and `id` name the machine concerned. `billed` means that something beside the machine, such as a disk, still
    costs money.
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
        """Return the data, with `code` even if it is the default of its class."""
        return {"code": self.code, **super().as_data()}


class PriceRose(Incident):
    """The provider reports a higher price for a running machine, from `since_wall` on."""

    code: str = "price.rose"
    rate_micros_per_hour: int
    since_wall: Seconds


class MachineEndsItself(Incident):
    """The machine was ordered over SSH to end itself at `ends_wall`."""

    code: str = "machine.ends_itself"
    ends_wall: Seconds


class AddressChanged(Incident):
    """The machine has got another address, which `instance` contains."""

    code: str = "machine.moved"
    instance: SeenMachine


class ExtraGone(Incident):
    """A machine beside the run's own, or one that appeared late, is proven gone."""

    id: str


class MachineGone(Incident):
    """While gpurun waited for the machine, its provider showed it as gone; the first time was `gone_s_ago` before."""

    code: str = "machine.gone"
    gone_s_ago: Seconds


class LegPlanned(JournalEvent):
    """The run will continue on another machine, by the plan in the file `plan`, from a checkpoint that is at home.

    `token`, `provider` and `region` belong to the lost machine; `why` is the provider's reason for its end. They are
    empty if no machine was lost since the last plan, and only its offers were unavailable. `files` are the checkpoint
    of `step`; there are none if the run starts from the beginning. `fruitless` is how many machines in a row brought no
    new checkpoint. `spent_micros` is the upper bound of the cost of all machines so far. `left_micros` is the rest of
    the cap, `left_gpu_hours` the rest of a cap in GPU-hours. `events_bytes` and `log_bytes` are the lengths of the
    local events file and log so far, all from earlier machines; `reached` is the last step in them.
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
    """The receipt is in the chain of receipts."""

    event = Event.RECEIPT_OBSERVED
    seq: int
    sha256: str


class RunClosed(JournalEvent):
    """The run is closed. The journal itself adds `seal`: the digest of this line without the seal."""

    event = Event.RUN_CLOSED
    exit_code: EndCode
    seal: str = ""


class JournalRepaired(JournalEvent):
    """An incomplete last line was cut off. `cut_bytes` is its length, `cut_sha256` its digest."""

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
"""The class of each incident code that has one of its own."""
_OF_MONEY = frozenset({
    "instance", "rules", "core_bundle_sha256", "beside_micros_per_hour", "egress_micros", "sends_itself",
    "least_billed_s", "legs", "ended_wall", "ran_s", "alive_s_ago", "up_s_ago", "gone_s_ago",
})  # fmt: skip
"""The fields with a default in which a wrong type damages the journal, because they concern money."""


def class_of(event: str, data: Mapping[str, Any]) -> type[JournalEvent]:
    """Return the class of an event; that of an incident depends on the `code` in its data."""
    if event == Event.INCIDENT:
        return INCIDENTS.get(str(data.get("code")), Incident)
    return CLASSES[Event(event)] if event in CLASSES else NewerEvent


def may_be_damage(event: str, data: Mapping[str, Any]) -> bool:
    """Return whether a line must be parsed to find damage: it has a machine, or its class has required fields."""
    return "instance" in data or bool(_list_required_fields(class_of(event, data)))


@cache
def _list_required_fields(kind: type[JournalEvent]) -> frozenset[str]:
    return frozenset(name for name, field in kind.model_fields.items() if field.is_required())


def read_event(event: str, data: Mapping[str, Any]) -> JournalEvent:
    """Return the event of a line, with strict JSON types ("5" is not a number); ValidationError if it is damaged."""
    kind, data = class_of(event, data), as_today(event, data)
    try:
        return kind.model_validate_json(_encode_as_json(data), strict=True)
    except ValidationError as error:
        wrong = {fault["loc"][0] if fault["loc"] else "" for fault in error.errors(include_url=False)}
        if wrong & (_OF_MONEY | _list_required_fields(kind)) or not wrong <= kind.model_fields.keys():
            raise
    return kind.model_validate_json(_encode_as_json({key: data[key] for key in data if key not in wrong}), strict=True)


def _encode_as_json(data: Mapping[str, Any]) -> bytes:
    """Return the data as JSON; half a surrogate pair, which gpurun never writes, becomes a question mark."""
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")


def as_today(event: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data of a line in today's form, if an older gpurun wrote it in another one.

    A field that an older gpurun did not write needs no conversion if it has a default in its class.
    """
    if event == Event.DEATH_READ and "alive_s_ago" in data and "up_s_ago" not in data:
        return {**data, "up_s_ago": data["alive_s_ago"]}  # An older gpurun had one time for both.
    return data
