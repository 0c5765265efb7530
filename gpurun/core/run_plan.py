"""What was asked for and what will be done: the request as typed, and the plan that was shown and agreed to.

Units stand in the names: `_s` seconds, `_bytes`, `_micros` millionths of a dollar.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from gpurun.core.command import Command
from gpurun.core.job_terms import TERMS, JobTerms
from gpurun.core.made_before import Earlier as Earlier
from gpurun.core.made_before import Quoted as Quoted
from gpurun.core.money import Micros
from gpurun.core.places import place_facts, place_kinds
from gpurun.core.records import Frozen, GpuNeed, Offer
from gpurun.core.stage_plan import StagePlan
from gpurun.core.sweep import Sweep
from gpurun.core.uplink import Uplink

MOST_LEGS = 5
"""On how many machines a run may be one after the other, where its user has not said it."""
HOLD_S = 900
"""For how long a machine is held for what is not at home, unless its user says otherwise."""


class Mode(StrEnum):
    """What kind of run this is: paid for, on this machine, the free rehearsal of a paid one, or a notebook's."""

    PAID = "paid"
    LOCAL = "local"
    REHEARSAL = "rehearsal"
    IMPORTED = "imported"


class Choices(Frozen):
    """What the user chose about the renting itself; every part takes what concerns it.

    `guard`: put a key there where only that arms its timer (Lambda). `weak_lease`: accept one that nothing on it ends.
    `accept_cpu`: train without a CUDA device. `slow_network`: or however slow it is between nodes. `setup`: the text of
    a script to run first, for `setup_limit_s` (0: the usual). `stage`: the bucket (s3://…) for shards and checkpoints.
    `warm`: send earlier compile caches along. `accept_skipped`: train on a folder of which most is passed over.
    `give_up_after_s`: how long a machine may be silent while it trains (0: to its lease). `log_to`: trackers of its
    figures. `trainer`: a folder to ship as the trainer. `core_bundle`: a file or URL with CORE's tasks. `queue_s`: how
    long it may wait. `max_gpu_hours`: the most for a job on a cluster, hours times GPUs or nodes. `limit_s`: the
    longest that it may take from its start (0: not said). `partition`, `account`, `qos`: in the place of its table's.
    `pass_env`: globs of its login's variables for the job. `idle_s`, `silent_s`: how long its job may be idle or
    silent before it is ended (0: to its lease; None: not said). `hold_s`: for how long at most a machine is kept whose
    end would take away what is not at home (0: not at all). `init`: the checkpoint of nanoGPT or minGPT whose
    weights it starts from. `keep_going`: where its machine is taken away or lost, the run continues on another one, on
    `legs` machines at most. No machine is waited for longer than `wait_s` (0: the usual), or past `until_wall` (0: not
    said); none costs more an hour than `max_rate_micros`.
    """

    region: str | None = None
    spot: bool = False
    guard: bool = False
    weak_lease: bool = False
    accept_cpu: bool = False
    image: str = ""
    setup: str = ""
    setup_limit_s: int = 0
    stage: str = ""
    warm: bool = False
    accept_skipped: bool = False
    give_up_after_s: int = 0
    idle_s: int | None = None
    silent_s: int | None = None
    hold_s: int = HOLD_S
    queue_s: int = 0
    max_gpu_hours: float | None = None
    limit_s: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    slow_network: bool = False
    log_to: tuple[str, ...] = ()
    trainer: str = ""
    core_bundle: str = ""
    pass_env: tuple[str, ...] = ()
    init: str = ""
    keep_going: bool = False
    legs: int = MOST_LEGS
    wait_s: int = 0
    until_wall: float = 0.0
    max_rate_micros: Micros | None = None

    @property
    def of_cluster(self) -> dict[str, str]:
        """Return what stands for this run in the place of a cluster's table, by the table's keys; "" leaves that."""
        own = {name: getattr(self, name) for name in ("partition", "account", "qos")}
        return {**own, "container": self.image}

    def with_limits_of(self, earlier: Choices) -> Choices:
        """Return the choices with the earlier limits of an idle and a silent job, where none is said now."""
        names = [name for name in ("idle_s", "silent_s") if getattr(self, name) is None]
        return self.model_copy(update={name: getattr(earlier, name) for name in names})


class Box(Frozen):
    """A machine that the user has already: how to log in, which host key is expected, and why it is trusted.

    `entry` is the name in ~/.ssh/config by which the user's own ssh reaches it, `jump` the login of a host on the way
    or that entry where it has a proxy, `python` the Python there that has torch; "" where nothing was said.
    """

    target: str
    identity: str
    host_key: str
    trusted: Literal["given", "known", "first use"]
    jump: str = ""
    jump_host_key: str = ""
    python: str = ""
    entry: str = ""


class Request(Frozen):
    """What the user asked for, as typed but for a recipe's file, which has its whole path; nothing is decided yet."""

    recipe: str
    overrides: tuple[str, ...] = ()
    gpu: GpuNeed | None = None
    max_cost_micros: Micros | None = None
    cap_from: str = ""
    """Where the cap was said: --max-cost, or the setting's place."""
    providers: tuple[str, ...] = ()
    data: str | None = None
    hours: float | None = None
    dry_run: bool = False
    choices: Choices = Choices()
    host: str = ""
    host_key: str = ""
    identity: str = ""
    jump: str = ""
    python: str = ""
    price_micros_per_hour: Micros | None = None
    uplink_mbit: Annotated[float, Field(gt=0)] | None = None  # What this computer sends, as its user has set it.
    continues: str = ""
    """The earlier run whose newest checkpoint this one goes on from."""
    quoted: Quoted | None = None
    """Where the request came in a plan file."""
    command: Command | None = None
    """What is to run in the place of a recipe."""
    sweep: Sweep | None = None
    """Where the recipe or the command is to run again and again, with which settings."""

    @property
    def recipe_word(self) -> str:
        """The recipe as a command that is to be copied names it."""
        return shlex.quote(self.recipe)

    @property
    def mode(self) -> Mode:
        """Return what kind of run is asked for: a rehearsal, one on this machine, or one elsewhere."""
        if self.dry_run:
            return Mode.REHEARSAL
        return Mode.LOCAL if place_kinds(self.providers) == {"here"} else Mode.PAID


class Estimate(Frozen):
    """What a recipe is expected to need on an offer; ranges are low to high, `basis` says what they rest on.

    `expected_s` is the training time where something was published for such a machine, else None. `sharded`: its GPUs
    share the weights (FSDP).
    """

    fits: bool
    peak_bytes: int
    micro_batch: int
    tokens_per_s: tuple[float, float] | None
    train_s: tuple[float, float] | None
    basis: str
    expected_s: float | None = None
    sharded: bool = False

    @property
    def likely_s(self) -> float | None:
        """The training time to reckon with: the published one, or that at the middle of the estimated speeds."""
        if self.train_s is None or self.expected_s is not None:
            return self.expected_s
        low, high = self.train_s
        return 2.0 * low * high / (low + high)


class Lease(Frozen):
    """The longest that each part of a rental may take; the deadline is their sum after create is sent.

    What boot, set-up and upload leave of their parts goes to training, unless `hours_s` (the user's --hours) says less.
    Where nothing is to be set up `setup_s` is 0. `queue_s` is how long it may wait before it begins, which costs
    nothing: the deadline is by so much later, and from its start on the machine has `total_s` as any other.
    """

    boot_s: int
    ship_s: int
    train_s: int
    collect_s: int
    destroy_s: int
    kill_allowance_s: int = 60
    hours_s: int | None = None
    setup_s: int = 0
    queue_s: int = 0

    @property
    def total_s(self) -> int:
        """From create sent to destroy done; with a queue, from the start."""
        return self.boot_s + self.setup_s + self.ship_s + self.train_s + self.collect_s + self.destroy_s

    def ends_wall(self, deadline_wall: float, started_wall: float | None) -> float:
        """Return the deadline; for what had to queue it comes forward to a whole lease after its start, once known."""
        if not self.queue_s or started_wall is None:
            return deadline_wall
        return min(deadline_wall, started_wall + self.total_s)


class Reach(Frozen):
    """How far a lease gets, which trains for `train_s`: the last step of `steps`, and the validation loss if known."""

    step: int
    steps: int
    train_s: int = 0
    val_loss: float | None = None
    val_loss_of: str = ""


class Candidate(Frozen):
    """An offer with what it would take and cost to finish there.

    `expected_micros` is for the whole run, or for the part that a lease holds where the user asked for so many hours;
    `slow_micros` is the same at the slow end of the estimate, and never more than `worst_micros`.
    `reach` is how far the cap, or the hours that were asked for, would get there; None where nothing is known.
    """

    offer: Offer
    estimate: Estimate
    lease: Lease | None
    expected_micros: Micros | None
    worst_micros: Micros | None
    finishes: bool
    why_not: str = ""
    reach: Reach | None = None
    slow_micros: Micros | None = None


class PublicFile(Frozen):
    """A public shard that the machine downloads itself: its name among the data, and what it must be."""

    name: str
    url: str
    bytes: int
    sha256: str


class DataSummary(Frozen):
    """The shards that a run trains on, in `folder`, or a command's data, which has no tokens that anybody counted.

    `beside` is a folder with data.json, vocab.json and prompts.json, for shards that belong to nobody's run; else "".
    `passed_over` is what of the text's folder is not in them, by reason: "2 binary, 1 in rows". `divided` says which of
    its files are held out, where that is a matter of their names. `public` are those of the shards that are not in the
    folder; `bytes` counts them too.
    """

    folder: str
    beside: str = ""
    tokenizer: str = ""
    tokenizer_sha256: str = ""
    vocab_size: int = 0
    train_tokens: int = 0
    val_tokens: int = 0
    bytes: int
    sha256: str
    source: str
    passed_over: str = ""
    divided: str = ""
    public: tuple[PublicFile, ...] = ()
    core_sha256: str = ""
    """The digest of the bundle whose items of CORE lie beside them."""
    public_origin: str = ""
    """The hub that the user named in place of huggingface.co, which may be in a network of their own."""

    @property
    def public_bytes(self) -> int:
        """What the machine downloads itself."""
        return sum(file.bytes for file in self.public)

    @property
    def is_public(self) -> bool:
        """Whether the machine downloads its shards itself; before they are asked for, their source's name tells."""
        return bool(self.public) or (not self.folder and self.source.startswith("hf:"))


class LegFile(Frozen):
    """A file of the checkpoint that a leg starts from: its name below the run's artifacts, and what it must be."""

    name: str
    bytes: int
    sha256: str
    kind: str
    step: int


class Leg(Frozen):
    """One machine of a run that moves from machine to machine: which one it is, and from where it continues.

    `files` are the checkpoint of `step`, which lie in `folder`; none where it starts from the beginning. `caches` lie
    there too: what was compiled on machines of the kinds `cached_on`. `spent_micros` is what the legs before it cost at
    most, `left_micros` what is left of the cap for this one.
    """

    number: int
    step: int
    files: tuple[LegFile, ...]
    folder: str
    spent_micros: Micros
    left_micros: Micros
    caches: tuple[LegFile, ...] = ()
    cached_on: tuple[str, ...] = ()

    def caches_for(self, offer: Offer) -> tuple[LegFile, ...]:
        """Return the compile caches that such a machine may use: they are code, so that none goes to another cloud."""
        return self.caches if machine_kind(offer) in self.cached_on else ()


def machine_kind(offer: Offer) -> str:
    """Return who rents out which cards there, in a line: machines of one kind can use what another one compiled."""
    return " ".join(filter(None, (offer.provider, offer.tier, offer.label)))


@dataclass(frozen=True)
class Workload:
    """What a machine starts for a job, and what is uploaded for it.

    `uploads` are files, folders or bytes by the place that they get there. `argv` runs in `cwd` with `env` beside the
    machine's own variables, `{python}` standing for the Python with torch, or any where the job needs none, and
    `{agent}` for the one that the agent runs by.
    `has_runner` says that the first process is gpurun's own, which runs the job as its child. `allowed` are files that
    may have the name or the content of a key, by their whole paths here. Of all kinds the agent, the driver and the
    download know the same: the log on standard output, progress in out/events.jsonl, outputs in out/MANIFEST.json, an
    end in the job's `save_s` after SIGTERM.
    """

    argv: tuple[str, ...]
    uploads: Mapping[str, Path | bytes]
    env: Mapping[str, str]
    has_runner: bool = False
    cwd: str = "bundle"
    allowed: tuple[str, ...] = ()


class Job(Frozen, ABC):
    """One job; a kind of job is a subclass in `gpurun.jobs.KIND`.

    `recipe` is what lists call it, `recipe_sha256` the digest over all that was asked of it. `resolved` are its
    settings as trackers log them, `parameters` those of its model, `trainer` says whose trainer it has; each is empty
    where a kind has no such thing. `form` is the smaller one where only a rehearsal is trained.
    """

    kind: ClassVar[str]
    terms: ClassVar[JobTerms]
    sends_itself: ClassVar[bool] = True
    """Whether it may send something by itself, which nobody here counts."""
    is_attended: ClassVar[bool] = False
    """Whether people log in and work there: what they do counts as work, and being idle is how it usually ends."""

    recipe: str
    recipe_sha256: str
    form: Literal["full", "rehearsal"] = "full"
    resolved: dict[str, Any] = Field(default_factory=dict)
    parameters: int = 0
    trainer: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _KINDS[cls.kind] = cls
        TERMS[cls.kind] = cls.terms

    @property
    def needs_torch(self) -> bool:
        """Return whether the Python that runs it must have torch."""
        return False

    @property
    @abstractmethod
    def disk_gb(self) -> int:
        """Return the disk that it wants on the machine."""

    @property
    @abstractmethod
    def home_bytes(self) -> int:
        """Return how much comes home at the end at most."""

    @property
    @abstractmethod
    def save_s(self) -> int:
        """Return how long it is given to save and end, from the stop signal on."""

    @abstractmethod
    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        """Return what the plan's machine, which has so many cores, starts; `trainer` is the package that it is sent."""

    @abstractmethod
    def digest(self, plan: Plan, trainer: Path) -> str:
        """Return one digest over the program that is uploaded: the trainer's modules, or the job's own folder."""

    def shipped(self, digest: str) -> Self:
        """Return the job with what the digest of its program tells of it."""
        return self

    @property
    def is_estimated(self) -> bool:
        """Return whether its time is reckoned from a recipe before it is begun."""
        return self.terms.has_model

    @property
    def steps(self) -> int:
        """Return how many steps it is to take; 0 where nobody has said it."""
        return 0

    @property
    def checkpoint_bytes(self) -> int:
        """Return what one checkpoint is counted to weigh: half of what comes home, as two are kept."""
        return self.home_bytes // 2

    @property
    def more_kept(self) -> int:
        """Return how many checkpoints are to come home beside the latest and the best."""
        return 0

    def most_bytes(self, kind: str) -> int | None:
        """Return the most that one of its files of a kind can weigh; None where nothing is known of it."""
        return self.disk_gb << 30

    @property
    def can_resume(self) -> bool:
        """Return whether it continues from its newest checkpoint on another machine."""
        return False

    @property
    def checkpoint_every(self) -> int:
        """Return after how many steps it saves a checkpoint; 0 where nobody has said it."""
        return 0

    def resumed(self, leg: Leg) -> Self:
        """Return the job as it continues on the machine of a leg."""
        return self

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the names of the secrets that it is given."""
        return ()

    @property
    def imports(self) -> tuple[str, ...]:
        """Return the modules that a machine's Python must find, since they are not uploaded."""
        return ()

    @property
    def python(self) -> str:
        """Return the Python that runs it on this machine; "" for gpurun's own."""
        return ""

    @property
    def pip(self) -> tuple[str, ...]:
        """Return the requirements that are installed into that Python first."""
        return ()

    @property
    def env(self) -> dict[str, str]:
        """Return the variables that its user gave it."""
        return {}

    @property
    def argv(self) -> tuple[str, ...]:
        """Return the command as its user typed it; () where nobody typed one."""
        return ()

    @property
    def challenge(self) -> str:
        """Return the challenge that it was given, as WORD:KEYID; "" where it has none."""
        return ""

    def code(self, plan: Plan, beside: Path) -> list[tuple[str, str]]:
        """Return where its user's own code lay, as names and texts; `beside` is where that folder of the plan is today.

        Nothing is said of a copy that has changed since it was uploaded.
        """
        return []

    def opened(self) -> dict[str, Any]:
        """Return what `run.opened` and the receipt say of it beside the facts that every kind has."""
        return {"job": self.kind}

    def headline(self) -> list[str]:
        """Return what the plan says of it in a line: its name first."""
        return [self.recipe]

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """Return what the plan calls that which is sent, and the names of its digests."""
        return [], []

    def cures(self, message: str, log: str) -> Iterator[str]:
        """Yield what would help after a failure, by its last words and the end of its log, which are claims."""
        yield from ()

    def flat(self) -> dict[str, Any]:
        """Return its part of plan.json, which `job_in` reads: what every kind has, and apart what this one has."""
        told = self.model_dump(mode="json")
        of_all = {key: told.pop(key) for key in Job.model_fields}
        return {**of_all, "job": {"kind": self.kind, **told}}


_KINDS: dict[str, type[Job]] = {}
_KIND = re.compile(r"[a-z][a-z0-9_]{0,30}")


def job_class(kind: str) -> type[Job]:
    """Return the class of a kind of job; ValueError for a kind that this gpurun does not have."""
    if kind not in _KINDS and _KIND.fullmatch(kind):
        try:
            import_module(f"gpurun.jobs.{kind}")
        except ModuleNotFoundError as error:
            raise ValueError(f"this gpurun has no job of the kind {kind!r}") from error
    if kind not in _KINDS:
        raise ValueError(f"this gpurun has no job of the kind {kind!r}")
    return _KINDS[kind]


def job_in(plan: Mapping[str, Any]) -> Job:
    """Return the job of a plan as its file has it.

    What trains and what runs a command are told flat, among the plan's own keys: so plan.json has always been.
    """
    told = plan.get("job")
    if isinstance(told, Job):
        return told
    if isinstance(told, dict):
        return job_class(str(told.get("kind"))).model_validate({**plan, **told})
    return job_class("command" if plan.get("command") else "trainer").model_validate(dict(plan))


class Plan(Frozen):
    """What will be done and what it may cost at most: shown, agreed to, and then not changed.

    It is a job on the candidate that was `chosen` for it. As JSON the parts of both stand beside the plan's, in the
    place of `job` and `chosen`: so plan.json has always been.
    """

    v: Literal[1] = 1
    run: str
    mode: Mode
    job: Job
    processes: int
    chosen: Candidate
    cap_micros: Micros | None
    cap_from: str = ""
    candidates: tuple[Candidate, ...]
    data: DataSummary
    bundle_sha256: str
    """The digest of the job's program."""
    ship_files: int
    ship_bytes: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    choices: Choices = Choices()
    stage: StagePlan | None = None
    box: Box | None = None
    uplink: Uplink = Uplink()
    continues: Earlier | None = None
    quoted_wall: float = 0.0
    mandate: str = ""
    """The id of the mandate that it was approved under; "" where a person agreed to it."""
    leg: Leg | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, told: Any) -> Any:
        """Return the plan's parts from plan.json, where those of the job and of the chosen candidate stand beside."""
        if not isinstance(told, dict):
            return told
        parts: dict[str, Any] = {"job": job_in(told)}
        if "chosen" not in told:
            parts["chosen"] = {"finishes": True, **{key: told[key] for key in _CHOSEN if key in told}}
        return {key: told[key] for key in told if key not in _CHOSEN} | parts

    @model_validator(mode="after")
    def _has_lease(self) -> Plan:
        if self.chosen.lease is None or self.chosen.worst_micros is None:
            raise ValueError(f"{self.chosen.offer.label} has no lease")
        return self

    @model_serializer(mode="wrap")
    def _flat(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = plain(self)
        if "job" in told:
            del told["job"]
            told = {**{key: told.pop(key) for key in ("v", "run", "mode") if key in told}, **self.job.flat(), **told}
        if "chosen" in told:
            parts = told.pop("chosen")
            told |= {key: parts[key] for key in _CHOSEN}
            told["expected_micros"] = self.expected_micros
        if not told.get("mandate"):  # As plan.json was before there were mandates.
            told.pop("mandate", None)
        if self.leg is None:
            told.pop("leg", None)
        return told

    @property
    def offer(self) -> Offer:
        """The offer that is rented, or the machine that there is."""
        return self.chosen.offer

    @property
    def estimate(self) -> Estimate:
        """What the run is expected to need there."""
        return self.chosen.estimate

    @property
    def enters_image(self) -> bool:
        """Whether the job's own words run in an image there, and what is gpurun's outside of it."""
        return bool(self.choices.image) and place_facts(self.offer.provider).enters_image

    @property
    def lease(self) -> Lease:
        """The longest that it may take there."""
        assert self.chosen.lease is not None
        return self.chosen.lease

    @property
    def expected_micros(self) -> Micros:
        """What it is expected to cost there; 0 where nothing is known."""
        return self.chosen.expected_micros or Micros(0)

    @property
    def worst_micros(self) -> Micros:
        """The most that it can cost there."""
        return self.chosen.worst_micros or Micros(0)

    @property
    def approved(self) -> tuple[Candidate, ...]:
        """What may be rented, in this order: the offer that was chosen, then the others that the cap pays for."""
        others = (one for one in self.candidates if one.lease is not None and one.offer != self.offer)
        return (self.chosen, *others) if self.mode is Mode.PAID else (self.chosen,)

    @property
    def most_micros(self) -> Micros:
        """The worst case of the dearest of the approved offers: what the user is asked to agree to."""
        return max(one.worst_micros or Micros(0) for one in self.approved)

    @property
    def cap_left_micros(self) -> Micros | None:
        """The cap, less what the machines before this one cost at most."""
        return self.leg.left_micros if self.leg is not None else self.cap_micros

    def told(self, *notes: str, warnings: Iterable[str] = ()) -> Plan:
        """The same plan with more to say: notes for information, and warnings of what may go against the user."""
        update = {"notes": (*self.notes, *notes), "warnings": (*self.warnings, *warnings)}
        return self.model_copy(update=update)

    def on(self, candidate: Candidate) -> Plan:
        """The same plan on another of its approved offers."""
        if candidate.lease is None or candidate.worst_micros is None:
            raise ValueError(f"{candidate.offer.label} was not approved")
        processes = candidate.offer.gpu_count or self.processes
        return self.model_copy(update={"chosen": candidate, "processes": processes})


_CHOSEN = ("offer", "estimate", "lease", "expected_micros", "worst_micros")
"""The parts of the chosen candidate that plan.json has."""
