"""The receipt as a typed record, which the ledger builds, the view shows and the audit checks (docs/RECEIPTS.md).

A `NotRequired` key is only in receipts that have a value for it; an older gpurun did not write some of these keys. Keys
that a newer gpurun adds are kept and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NotRequired

from typing_extensions import TypedDict

from gpurun.core.collected_record import ReceiptCheckpoint

Is = TypedDict("Is", {"is": str})
"""The source of a group of figures: measured, provider-reported, instance-reported, planned or unknown."""
Number = int | float
UNKNOWN = "unknown"


class Signature(StrEnum):
    """The result of checking an envelope."""

    OK = "ok"
    UNSIGNED = "unsigned"
    UNKNOWN_KEY = "unknown key"
    BAD = "bad"


class Basis(TypedDict):
    """The part of the journal on which a receipt is based: the number of records, and the sha256 of the last line."""

    head: str
    records: int


class Continues(TypedDict):
    """The checkpoint from which a run continued: the earlier run, the step, and the steps that it was planned for."""

    run: str
    step: int
    steps: NotRequired[int]


class ReceiptCommand(TypedDict):
    """A command of the user: its words, and the names of its variables without values."""

    argv: list[str]
    env: list[str]
    secrets: list[str]


class ReceiptAsked(TypedDict):
    """The request. `trainer` is for example "official trainer 0.1.0" or "changed trainer".

    `job` is the kind of job if it is neither a recipe nor a command, `legs` the maximum number of machines. `imported`
    has the platform of a notebook that gpurun could not watch, and the digests of its evidence.
    """

    mode: str
    recipe: str
    form: str
    provider: str
    continues: NotRequired[Continues]
    challenge: NotRequired[str]
    command: NotRequired[ReceiptCommand]
    job: NotRequired[str]
    trainer: NotRequired[str]
    max_gpu_hours: NotRequired[Number]
    legs: NotRequired[int]
    imported: NotRequired[dict[str, str]]


class Digested(TypedDict):
    """A file's length and sha256; None and "unknown" if the file is missing."""

    bytes: int | None
    sha256: str


class ReceiptDigests(TypedDict):
    """The digests of a run's inputs, and of its log and events."""

    request: str
    plan: str
    recipe: str
    data: str
    trainer: str
    shipped: str
    log: Digested
    events: Digested
    core_bundle: NotRequired[str]


class Shipping(Is):
    """The bytes that were sent over each route: over SSH, to and from the bucket, and by the machine's own download."""

    by_ssh_bytes: int | None
    bucket: str | None
    to_bucket_bytes: int | None
    from_bucket_bytes: int | None
    public: NotRequired[str]
    public_bytes: NotRequired[int]


class ReceiptFacts(Is):
    """The machine's report about itself."""

    hello: Any


class ReceiptMachine(Is):
    """The run's last machine. `as_ordered` names the fields that come from the order, not from the provider."""

    provider: str
    id: str | None
    token: str
    type: str
    region: str
    gpu: str
    gpu_count: int
    nodes: NotRequired[int]
    jobs: NotRequired[int]
    created_wall: Number | None
    facts: ReceiptFacts | None
    as_ordered: NotRequired[list[str]]
    endpoint: NotRequired[str | None]


class Timeline(Is):
    """The times at which events were observed by this computer, in UTC, or "unknown"."""

    asked: str
    exists: str
    ready: str
    shipped: str
    train_start: str
    train_end: str
    collected: str
    gone: str


class Division(Is):
    """The seconds of each part of the training phase, as the machine reports them; None if they do not fit in it."""

    seconds: dict[str, Number] | None


class Planned(Is):
    """The plan's time limit for each phase, and the training time that it expected: [least, most]."""

    limits_s: dict[str, Number]
    training_s: list[Number] | None


class Runtime(Is):
    """The seconds that may be billed, and their division into phases."""

    billable_s: Number | None
    phases_s: dict[str, Number]
    training: NotRequired[Division]
    planned: NotRequired[Planned | None]


class ExtraPaid(TypedDict):
    """An extra machine with the rental's token, and its cost. `ended` means that it is proven gone."""

    id: str | None
    billable_s: Number
    micros: int
    ended: bool


class RisePaid(TypedDict):
    """A higher price while the machine ran, and the seconds at this price or above."""

    rate_micros_per_hour: int
    billable_s: Number


class RentalPaid(TypedDict):
    """One rental in the costs."""

    attempt: int
    token: str
    machines: int
    billable_s: Number | None
    billing_unit_s: int
    rate_micros_per_hour: int
    rate_is: str
    micros: int | None
    end: str
    end_is: NotRequired[str]
    extras: NotRequired[list[ExtraPaid]]
    price_rose: NotRequired[list[RisePaid]]


class ReceiptLeg(TypedDict):
    """One machine of a run that continued on other machines.

    `step` is the checkpoint from which it started. `again` is how many steps it repeated because an earlier machine had
    lost them, and `again_micros` is what these steps had cost on that machine. `on_demand_micros` is what its share of
    an unbroken run would have cost on demand, if that price was known. `why` is the provider's reason for its end, if
    another machine followed.
    """

    leg: int
    token: str
    provider: str
    region: str | None
    gpu: str | None
    gpu_count: int | None
    spot: bool
    step: int
    again: int
    micros: int | None
    outcome: str
    again_micros: NotRequired[int]
    on_demand_micros: NotRequired[int]
    why: NotRequired[str]


class Cost(Is):
    """The upper bound of the cost. `says` is a sentence on what bounds it, `gpu_hours` is for a cluster.

    `on_demand_micros` is what the same time would have cost on demand, for a run's only machine, if it was spot and the
    price on demand was known. In a run that continued on other machines, each leg has this figure instead.
    """

    upper_bound_micros: int | None
    billed_micros: int | None
    billed_is: str
    worst_micros: int
    cap_micros: int | None
    cap_kept: bool | None
    rentals: list[RentalPaid]
    gpu_hours: NotRequired[Number | None]
    on_demand_micros: NotRequired[int]
    says: NotRequired[str]


class ReceiptMeasured(Is):
    """How long the job ran until this computer observed its end, in seconds by this computer's clock.

    `told_s` is how long it ran by the machine's clock, if that is more than a minute less.
    """

    train_s: Number | None
    told_s: NotRequired[Number]


class ReceiptStart(Is):
    """The part of the trainer's first start event that a receipt quotes; None if there was no such event."""

    event: dict[str, Any] | None


class ReceiptLog(Is):
    """Lines of the trainer that a receipt quotes."""

    lines: list[str]


class ReceiptSessions(Is):
    """The use of a dev box: the opened terminals, the seconds with an open terminal, and those with activity."""

    terminals: int
    open_s: Number
    used_s: Number


class ReceiptGpuUse(Is):
    """The use of the GPUs while the job ran, from `looks` samples by the machine's agent.

    `busy` counts the samples in which a GPU was busy, `own` the busy samples in which a process of the job used a GPU.
    `most_mib` is the highest memory use.
    """

    looks: int
    busy: int
    own: int
    most_mib: int


class ReceiptTrial(TypedDict):
    """One trial of a sweep: its settings, its last state, its result, and its share of the cost by its seconds.

    A `restored` trial ran in an earlier run, and costs nothing in this one.
    """

    trial: int
    state: str
    params: dict[str, str]
    step: int | None
    steps: int | None
    result: Number | None
    tokens: int | None
    seconds: Number | None
    micros: int | None
    why: NotRequired[str]
    restored: NotRequired[bool]


class ReceiptTrials(Is):
    """All trials of a sweep in order, and the number of the best; None if no trial has a result."""

    best: int | None
    rows: list[ReceiptTrial]


class Training(TypedDict):
    """The outcome of the training. `figures` are losses, steps and tokens as the trainer reported them.

    `warnings` are the trainer's first eight: effects of memory that ran out, loss spikes, deviations from the recipe.
    """

    outcome: str
    reason: str
    message: str
    exit_code: int | None
    failed_step: Any
    seconds: ReceiptMeasured
    device: str
    start: ReceiptStart
    figures: dict[str, Any]
    log: ReceiptLog
    gpu_use: NotRequired[ReceiptGpuUse]
    sessions: NotRequired[ReceiptSessions]
    trials: NotRequired[ReceiptTrials]
    warnings: NotRequired[ReceiptLog]


class ReceiptSample(TypedDict):
    """The last text that the model wrote, with its step and prompt."""

    step: int | None
    prompt: str
    text: str


class Proof(TypedDict):
    """The readings that prove the end of one machine."""

    token: str
    teardown: str
    id: str | None
    reads: int | None
    spread_s: Number | None
    evidence_sha256: str | None
    readings: list[dict[str, Any]]


class ReceiptTeardown(TypedDict("_Teardown", {"is": str | None})):
    """The ends of all machines that may have existed. `is` is the last one's, or "not_proven" if one is not proven.

    `is` is None if no machine was created.
    """

    evidence: list[Proof]


class Verdict(Is):
    """The run's verdict, a sentence that explains it (`says`), and a sentence on what it does not prove (`not_shown`).

    Older receipts have the verdict `gpu` or `smoke`; today's verdicts are in ledger/log_facts.py.
    """

    says: str
    not_shown: NotRequired[str]


def on_gpu(verdict: Verdict) -> bool:
    """Return whether a verdict, also an older receipt's, states that the run used a GPU."""
    return verdict["is"].partition(",")[0] == "gpu"


class ReceiptIncident(TypedDict):
    """An unexpected event, with its time."""

    at: str
    code: str
    message: str


class Signing(TypedDict):
    """The key that signed the receipt; None if it is unsigned."""

    keyid: str | None


class ReceiptProgram(TypedDict):
    """The gpurun version that opened the run."""

    version: str


class Predicate(TypedDict):
    """Everything that a receipt states about a run.

    `seq` is its place in the chain, `prev` the sha256 of the receipt before it. `rules` is the version of the rules by
    which it follows from the run folder (core/receipt_rules.py); receipts of version 1 do not have this key.
    """

    v: int
    rules: NotRequired[int]
    run: str
    seq: int
    prev: str
    journal: Basis
    signing: Signing
    asked: ReceiptAsked
    digests: ReceiptDigests
    shipping: NotRequired[Shipping]
    gpurun: ReceiptProgram
    platform: Any
    instance: ReceiptMachine | None
    timeline: Timeline
    runtime: Runtime
    cost: Cost
    legs: NotRequired[list[ReceiptLeg]]
    training: Training
    checkpoint: ReceiptCheckpoint
    sample: ReceiptSample | None
    teardown: ReceiptTeardown
    verdict: Verdict
    incidents: list[ReceiptIncident]


class Subject(TypedDict):
    """A file that the statement is about."""

    name: str
    digest: dict[str, str]


class Statement(TypedDict):
    """The in-toto Statement in a receipt's envelope."""

    _type: str
    subject: list[Subject]
    predicateType: str
    predicate: Predicate


@dataclass(frozen=True)
class Receipt:
    """A receipt as it was read. `signature` is the result of checking it against this home's public keys."""

    statement: Statement
    envelope: dict[str, Any]
    sha256: str
    signature: Signature

    @property
    def predicate(self) -> Predicate:
        """Return everything that the receipt states about the run."""
        return self.statement["predicate"]
