"""The receipt as a typed record: the ledger builds it, the view draws it, the audit reads it (docs/RECEIPTS.md).

A key that is `NotRequired` stands only in the receipts that have something to say under it; an older gpurun did not
write some of them. What a newer one adds is kept and passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NotRequired

from typing_extensions import TypedDict

from gpurun.core.collected_record import CheckpointTold

Is = TypedDict("Is", {"is": str})
"""What a group of figures rests on: measured, provider-reported, instance-reported, planned or unknown."""
Number = int | float
UNKNOWN = "unknown"


class Signature(StrEnum):
    """What checking an envelope found."""

    OK = "ok"
    UNSIGNED = "unsigned"
    UNKNOWN_KEY = "unknown key"
    BAD = "bad"


class Basis(TypedDict):
    """How many records of the journal a receipt rests on, and the sha256 of the last one's line."""

    head: str
    records: int


class Continues(TypedDict):
    """The checkpoint that a run went on from."""

    run: str
    step: int
    steps: NotRequired[int]


class CommandTold(TypedDict):
    """A command of the user's own: its words, and the names of its variables without a value."""

    argv: list[str]
    env: list[str]
    secrets: list[str]


class ReceiptAsked(TypedDict):
    """What was to be done; `trainer` is "official trainer 0.1.0" or "changed trainer".

    `job` is its kind where it is neither a recipe nor a command. `legs`: on how many machines it may have been.

    `imported` has the platform of a notebook that ran where nothing here could see it, and its evidence's digests.
    """

    mode: str
    recipe: str
    form: str
    provider: str
    continues: NotRequired[Continues]
    challenge: NotRequired[str]
    command: NotRequired[CommandTold]
    job: NotRequired[str]
    trainer: NotRequired[str]
    max_gpu_hours: NotRequired[Number]
    legs: NotRequired[int]
    imported: NotRequired[dict[str, str]]


class Digested(TypedDict):
    """A file's length and sha256; None and "unknown" where it is not there."""

    bytes: int | None
    sha256: str


class ReceiptDigests(TypedDict):
    """What went into a run, and what its trainer said."""

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
    """Which bytes went which way, as sent."""

    by_ssh_bytes: int | None
    bucket: str | None
    to_bucket_bytes: int | None
    from_bucket_bytes: int | None
    public: NotRequired[str]
    public_bytes: NotRequired[int]


class ReceiptFacts(Is):
    """What the machine says of itself."""

    hello: Any


class ReceiptMachine(Is):
    """The last machine; what the provider did not tell is named in `as_ordered`."""

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
    """When things were seen here, in UTC, or "unknown"."""

    asked: str
    exists: str
    ready: str
    shipped: str
    train_start: str
    train_end: str
    collected: str
    gone: str


class Division(Is):
    """How the training phase divides, by the machine's word."""

    seconds: dict[str, Number] | None


class Planned(Is):
    """What the plan allowed each phase at most, and how long it expected training to take: (least, most)."""

    limits_s: dict[str, Number]
    training_s: list[Number] | None


class Runtime(Is):
    """Seconds that may be billed, and where they went."""

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
    """One rental in the costs; what only some rentals have is there only in those."""

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


class LegTold(TypedDict):
    """One machine of a run that continued on others: from which step, and how many of its steps were trained before.

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
    """What the run cost at most; `says` is there where a beginning or an end was not seen, `gpu_hours` on a cluster."""

    upper_bound_micros: int | None
    billed_micros: int | None
    billed_is: str
    worst_micros: int
    cap_micros: int | None
    cap_kept: bool | None
    rentals: list[RentalPaid]
    gpu_hours: NotRequired[Number | None]
    says: NotRequired[str]


class ReceiptMeasured(Is):
    """Seconds of training by this machine's clock."""

    train_s: Number | None


class StartTold(Is):
    """The trainer's first start event, or what a receipt has of it."""

    event: dict[str, Any] | None


class LogTold(Is):
    """The lines of the trainer that a receipt quotes."""

    lines: list[str]


class SessionsTold(Is):
    """How people used a dev box: the terminals that were opened, and the seconds with one open, or in use."""

    terminals: int
    open_s: Number
    used_s: Number


class ReceiptGpuUse(Is):
    """How often the machine's agent looked at the cards while the job ran, and what it saw.

    They were `busy` in so many looks, and in `own` of them a process of the job held one; with `most_mib` of memory.
    """

    looks: int
    busy: int
    own: int
    most_mib: int


class TrialTold(TypedDict):
    """One trial of a sweep: its settings, how it ended, its result, and its share of the cost by its seconds.

    One that was `restored` ran in an earlier run, and costs nothing in this one.
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


class TrialsTold(Is):
    """All trials of a sweep in their order, and the number of the best."""

    best: int | None
    rows: list[TrialTold]


class Training(TypedDict):
    """What became of the training. `figures` are losses, steps and speed as the trainer reported them.

    `warnings` are its first eight: what memory that ran out has lost, what jumped, what is not as the recipe hoped.
    """

    outcome: str
    reason: str
    message: str
    exit_code: int | None
    failed_step: Any
    seconds: ReceiptMeasured
    device: str
    start: StartTold
    figures: dict[str, Any]
    log: LogTold
    gpu_use: NotRequired[ReceiptGpuUse]
    sessions: NotRequired[SessionsTold]
    trials: NotRequired[TrialsTold]
    warnings: NotRequired[LogTold]


class SampleTold(TypedDict):
    """What the model wrote last."""

    step: int | None
    prompt: str
    text: str


class Proof(TypedDict):
    """The reads behind the end of one machine."""

    token: str
    teardown: str
    id: str | None
    reads: int | None
    spread_s: Number | None
    evidence_sha256: str | None
    readings: list[dict[str, Any]]


class TeardownTold(TypedDict("_Teardown", {"is": str | None})):
    """How every machine that may have existed came to its end; None where none was made."""

    evidence: list[Proof]


class Verdict(Is):
    """What the run may be called, the sentence that goes with it, and one of what it does not show (new with them).

    Older receipts have `gpu` or `smoke`; ledger/log_facts.py has the words of today.
    """

    says: str
    not_shown: NotRequired[str]


def on_gpu(verdict: Verdict) -> bool:
    """Whether a verdict, of today or of an older receipt, calls the run one on a GPU."""
    return verdict["is"].partition(",")[0] == "gpu"


class IncidentTold(TypedDict):
    """What should not have happened, with when."""

    at: str
    code: str
    message: str


class Signing(TypedDict):
    """Whose key the receipt is signed with; None where it is unsigned."""

    keyid: str | None


class ReceiptProgram(TypedDict):
    """The gpurun that opened the run."""

    version: str


class Predicate(TypedDict):
    """What is stated about a run. `prev` is the sha256 of the receipt before, `seq` the place in the chain.

    `rules` say how it follows from the run folder (core/receipt_rules.py); the first had no such key.
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
    legs: NotRequired[list[LegTold]]
    training: Training
    checkpoint: CheckpointTold
    sample: SampleTold | None
    teardown: TeardownTold
    verdict: Verdict
    incidents: list[IncidentTold]


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
    """A receipt as it was read. `signature` is the answer of the check against this home's public keys."""

    statement: Statement
    envelope: dict[str, Any]
    sha256: str
    signature: Signature

    @property
    def predicate(self) -> Predicate:
        """What is stated about the run."""
        return self.statement["predicate"]
