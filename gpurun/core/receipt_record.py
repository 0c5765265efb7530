"""The receipt as a typed record: the ledger builds it, the view draws it, the audit reads it (docs/RECEIPTS.md).

A `NotRequired` key stands only in receipts that have content for it; an older gpurun did not write some of them.
Keys that a newer gpurun adds are kept and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NotRequired

from typing_extensions import TypedDict

from gpurun.core.collected_record import ReceiptCheckpoint

Is = TypedDict("Is", {"is": str})
"""The basis of a group of figures: measured, provider-reported, instance-reported, planned or unknown."""
Number = int | float
UNKNOWN = "unknown"


class Signature(StrEnum):
    """The result of checking an envelope."""

    OK = "ok"
    UNSIGNED = "unsigned"
    UNKNOWN_KEY = "unknown key"
    BAD = "bad"


class Basis(TypedDict):
    """How many records of the journal a receipt is based on, and the sha256 of the last one's line."""

    head: str
    records: int


class Continues(TypedDict):
    """The checkpoint that a run continued from."""

    run: str
    step: int
    steps: NotRequired[int]


class ReceiptCommand(TypedDict):
    """A command of the user: its words, and the names of its variables without values."""

    argv: list[str]
    env: list[str]
    secrets: list[str]


class ReceiptAsked(TypedDict):
    """The request; `trainer` is "official trainer 0.1.0" or "changed trainer".

    `job` is its kind if it is neither a recipe nor a command. `legs`: the maximum number of machines.

    `imported` has the platform of a notebook that ran where gpurun could not see it, and the digests of its evidence.
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
    """The digests of a run's inputs, and of what its trainer wrote."""

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
    """The bytes that took each route, as sent."""

    by_ssh_bytes: int | None
    bucket: str | None
    to_bucket_bytes: int | None
    from_bucket_bytes: int | None
    public: NotRequired[str]
    public_bytes: NotRequired[int]


class ReceiptFacts(Is):
    """What the machine reports about itself."""

    hello: Any


class ReceiptMachine(Is):
    """The last machine; `as_ordered` names the fields that the provider did not report."""

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
    """When events were observed here, in UTC, or "unknown"."""

    asked: str
    exists: str
    ready: str
    shipped: str
    train_start: str
    train_end: str
    collected: str
    gone: str


class Division(Is):
    """How the training phase divides, as reported by the machine."""

    seconds: dict[str, Number] | None


class Planned(Is):
    """The most time that the plan allowed each phase, and the expected training time: (least, most)."""

    limits_s: dict[str, Number]
    training_s: list[Number] | None


class Runtime(Is):
    """Seconds that may be billed, and how they were spent."""

    billable_s: Number | None
    phases_s: dict[str, Number]
    training: NotRequired[Division]
    planned: NotRequired[Planned | None]


class ExtraPaid(TypedDict):
    """A machine beside the run's own that was paid for."""

    id: str | None
    billable_s: Number
    micros: int
    ended: bool


class RisePaid(TypedDict):
    """A price that rose while the machine ran."""

    rate_micros_per_hour: int
    billable_s: Number


class RentalPaid(TypedDict):
    """One rental in the costs; optional keys stand only in the rentals that have them."""

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
    """One machine of a run that continued on others: its first step, and how many of its steps were repeated.

    `again_micros` is what these steps had cost on the machine that was lost. `on_demand_micros` is what its share of an
    unbroken run would have cost on demand, where that price was known. `why` is how it ended, in its provider's words,
    where another machine followed.
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
    """The most that it cost; `says` explains a beginning or end that was not seen, `gpu_hours` is for a cluster.

    `on_demand_micros` is what the same time would have cost on demand, for one spot machine whose price on demand was
    known; a run that continued on others has that in its legs.
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
    """Seconds until the end of the job was seen, by this computer's clock.

    `told_s` is how long it ran by the machine's clock, if that is at least a minute less.
    """

    train_s: Number | None
    told_s: NotRequired[Number]


class ReceiptStart(Is):
    """The trainer's first start event, or the part of it in a receipt."""

    event: dict[str, Any] | None


class ReceiptLog(Is):
    """The lines of the trainer that a receipt quotes."""

    lines: list[str]


class ReceiptSessions(Is):
    """How people used a dev box: the terminals that were opened, and the seconds with an open terminal, or in use."""

    terminals: int
    open_s: Number
    used_s: Number


class ReceiptGpuUse(Is):
    """How often the machine's agent sampled the GPUs while the job ran, and what it saw.

    `busy` counts the samples in which they were busy, `own` those of them in which a process of the job held a GPU;
    `most_mib` is the most memory in use.
    """

    looks: int
    busy: int
    own: int
    most_mib: int


class ReceiptTrial(TypedDict):
    """One trial of a sweep: its settings, how it ended, its result, and its share of the cost by its seconds.

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
    """All trials of a sweep in order, and the number of the best."""

    best: int | None
    rows: list[ReceiptTrial]


class Training(TypedDict):
    """The outcome of the training. `figures` are losses, steps and speed as the trainer reported them.

    `warnings` are its first eight: effects of memory that ran out, loss spikes, deviations from the recipe.
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
    """The last text that the model wrote."""

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
    """How every machine that may have existed ended; None if none was created."""

    evidence: list[Proof]


class Verdict(Is):
    """The run's verdict, the sentence that explains it, and a sentence on what it does not prove (added later).

    Older receipts have `gpu` or `smoke`; today's words are in ledger/log_facts.py.
    """

    says: str
    not_shown: NotRequired[str]


def on_gpu(verdict: Verdict) -> bool:
    """Return whether a verdict, of today or of an older receipt, says that the run used a GPU."""
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
    """What is stated about a run. `prev` is the sha256 of the receipt before, `seq` the place in the chain.

    `rules` is the version of the rules by which it follows from the run folder (core/receipt_rules.py); version 1 had
    no such key.
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
        """Return what is stated about the run."""
        return self.statement["predicate"]
