"""The user's request as typed, and the plan that was shown and approved.

Names contain units: `_s` seconds, `_bytes`, `_micros` millionths of a dollar.
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
"""The maximum number of machines of a run, one after the other, unless the user sets another number."""
HOLD_S = 900
"""The longest time that a machine is held for files that are not at home, unless the user sets another time."""


class Mode(StrEnum):
    """The kind of run: on another machine ("paid"), on this computer, a free rehearsal, or a notebook's."""

    PAID = "paid"
    LOCAL = "local"
    REHEARSAL = "rehearsal"
    IMPORTED = "imported"


class Choices(Frozen):
    """The user's options for machine and job; each part of gpurun reads the options that concern it.

    The machine: `guard`: put a key on it if its timer needs one (Lambda). `weak_lease`: accept a machine that cannot
    end itself. `accept_cpu`: train without a CUDA device. `slow_network`: accept any speed between nodes. `setup`: the
    text of a script to run first, for at most `setup_limit_s` (0: the default). `max_rate_micros`: the highest price
    per hour. `hold_s`: the longest time that a machine is held if its end would destroy files that are not at home (0:
    it is not held).

    The job: `stage`: the bucket (s3://…) for shards and checkpoints. `warm`: upload earlier compile caches, too.
    `accept_skipped`: train on a folder of texts even if most of it is skipped. `log_to`: experiment trackers for the
    figures. `trainer`: a folder to upload as the trainer. `core_bundle`: a file or URL with CORE's tasks. `init`: a
    checkpoint of nanoGPT or minGPT with the initial weights. `give_up_after_s`: how long the machine may be silent
    while it trains (0: until the lease ends). `idle_s`, `silent_s`: how long the job may be idle or silent before it is
    ended (0: until the lease ends; None: not set).

    A cluster: `clusters`: the named ones, if several; the job may be on any of them. `queue_s`: how long the job may
    wait in a queue. `limit_s`: its longest time from its start (0: not set). `max_gpu_hours`: the limit in hours times
    GPUs (or nodes without GPUs). `partition`, `account`, `qos`: replace the values in the cluster's table. `pass_env`:
    globs of the login's environment variables that the job gets.

    Another machine: `keep_going`: if the machine is taken away or lost, the run continues on another one, on at most
    `legs` machines. It waits for another machine at most `wait_s` (0: the default), and not after `until_wall` (0: not
    set).
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
    clusters: tuple[str, ...] = ()

    def opened_as(self, provider: str, region: str) -> str:
        """Return the name by which gpurun opens the provider of a machine, as `--provider` takes it.

        If the user named several clusters, it is the machine's own cluster alone (the region is its name), because
        another cluster that does not answer must not hinder this job.
        """
        return f"{provider}:{region}" if region in self.clusters else provider

    @property
    def of_cluster(self) -> dict[str, str]:
        """Return the options that replace values of a cluster's table, by the table's key; "" replaces no value."""
        own = {name: getattr(self, name) for name in ("partition", "account", "qos")}
        return {**own, "container": self.image}

    def with_limits_of(self, earlier: Choices) -> Choices:
        """Return these choices, in which a limit for an idle or silent job that is not set is the earlier run's."""
        names = [name for name in ("idle_s", "silent_s") if getattr(self, name) is None]
        return self.model_copy(update={name: getattr(earlier, name) for name in names})


class Box(Frozen):
    """The user's own machine: how to log in, which host key is expected, and why it is trusted.

    `entry` is the name in ~/.ssh/config by which the user's own ssh reaches the machine. `jump` is the login of a host
    on the way, or the same as `entry` if that entry has a proxy. `python` is the machine's Python that has torch. Each
    of these is "" if not given.
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
    """The user's request as typed, except that a recipe's file has its absolute path. It contains no decisions."""

    recipe: str
    overrides: tuple[str, ...] = ()
    gpu: GpuNeed | None = None
    max_cost_micros: Micros | None = None
    cap_from: str = ""
    """The source of the cap: --max-cost, or the place of the setting."""
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
    uplink_mbit: Annotated[float, Field(gt=0)] | None = None  # The upload speed of this computer, as its user set it.
    continues: str = ""
    """The name of the earlier run from whose newest checkpoint this run continues."""
    quoted: Quoted | None = None
    """The quote, if the request came in a plan file."""
    command: Command | None = None
    """The command to run in place of a recipe."""
    sweep: Sweep | None = None
    """The settings of a sweep, if the recipe or the command runs many times."""

    @property
    def recipe_word(self) -> str:
        """Return the recipe, quoted for a command line that the user can copy."""
        return shlex.quote(self.recipe)

    @property
    def mode(self) -> Mode:
        """Return the requested kind of run: a rehearsal, a run on this computer, or a run on another machine."""
        if self.dry_run:
            return Mode.REHEARSAL
        return Mode.LOCAL if place_kinds(self.providers) == {"here"} else Mode.PAID


class Estimate(Frozen):
    """The expected memory, speed and time of a recipe on an offer. Ranges are (low, high).

    `basis` names the source of the figures. `expected_s` is the training time if one was published for such a machine,
    else None. `sharded` means that the GPUs share the weights (FSDP). If no time can be estimated, `obstacle` is the
    code of the reason, and `basis` the reason in words: "memory", "batch", "processes" or "precision" do not fit, or
    the GPU's "speed" is not known.
    """

    fits: bool
    peak_bytes: int
    micro_batch: int
    tokens_per_s: tuple[float, float] | None
    train_s: tuple[float, float] | None
    basis: str
    expected_s: float | None = None
    sharded: bool = False
    obstacle: str = ""

    @property
    def likely_s(self) -> float | None:
        """Return the training time to plan with: the published one, or the middle of the estimated range."""
        if self.train_s is None or self.expected_s is not None:
            return self.expected_s
        low, high = self.train_s
        return 2.0 * low * high / (low + high)


class Lease(Frozen):
    """The time limits of the parts of a rental; their sum, from the create request on, is the deadline.

    Time that boot, set-up and upload leave unused goes to training, unless `hours_s` (the user's --hours) is shorter.
    `setup_s` is 0 without a set-up. `queue_s` is how long a job may wait in a queue, which costs nothing: the deadline
    is later by this time, and from its start the job has `total_s`. `limit_s` is the longest time for which the
    machine's place lets a job run, if this limit and no cap ends the training; 0 otherwise. Another job can then do the
    rest of the training.
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
    limit_s: int = 0

    @property
    def total_s(self) -> int:
        """Return the seconds from the create request to the proven end; for a queued job, from its start."""
        return self.boot_s + self.setup_s + self.ship_s + self.train_s + self.collect_s + self.destroy_s

    def ends_wall(self, deadline_wall: float, started_wall: float | None) -> float:
        """Return the deadline; that of a queued job is at most `total_s` after its start, once the start is known."""
        if not self.queue_s or started_wall is None:
            return deadline_wall
        return min(deadline_wall, started_wall + self.total_s)


class Reach(Frozen):
    """The progress that `train_s` of training allows: the step out of `steps`, and its validation loss if known."""

    step: int
    steps: int
    train_s: int = 0
    val_loss: float | None = None
    val_loss_of: str = ""


class Candidate(Frozen):
    """An offer, with the time and cost of the run on it.

    `expected_micros` is for the whole run, or for the part that fits the lease if the user set --hours; `slow_micros`
    is the same at the slow end of the estimate, and never more than `worst_micros`. `reach` is the progress that the
    cap or --hours allows on this offer; None if unknown. If the run does not finish, `obstacle` is the code of the
    reason and `why_not` the reason in words: an obstacle of the estimate, "cap", "hours", "year", or "consent" if only
    the user's consent is missing. `needs_consent` means that only this computer would end the machine. `needed` is the
    cap or the time that would be enough, if known.
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
    obstacle: str = ""
    needed: str = ""
    needs_consent: bool = False


class PublicFile(Frozen):
    """A public shard that the machine downloads itself: its name in the data folder, its URL, size and digest."""

    name: str
    url: str
    bytes: int
    sha256: str


class DataSummary(Frozen):
    """The shards that a run trains on, in `folder`, or a command's data, whose tokens are not counted.

    `beside` is the run's folder with data.json, vocab.json and prompts.json, if the shards lie in a shared folder; for
    a command, it contains the copy of the command's folder; else "". `passed_over` lists what was skipped in the folder
    of texts, by reason: "2 binary, 1 in rows". `divided` says which files are held out, if that depends on their names.
    `public` are the shards that are not in `folder` because the machine downloads them; `bytes` includes them.
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
    """The digest of the bundle from which the CORE items beside the shards were made; "" if there are none."""
    public_origin: str = ""
    """The hub that the user named in place of huggingface.co, perhaps in a private network; "" for none."""

    @property
    def public_bytes(self) -> int:
        """Return how many bytes the machine downloads itself."""
        return sum(file.bytes for file in self.public)

    @property
    def is_public(self) -> bool:
        """Return whether the machine downloads its shards itself; before they are listed, the source shows it."""
        return bool(self.public) or (not self.folder and self.source.startswith("hf:"))


class LegFile(Frozen):
    """A file of the checkpoint that a leg starts from: its name below the run's artifacts, its size and its digest."""

    name: str
    bytes: int
    sha256: str
    kind: str
    step: int


class Leg(Frozen):
    """A leg: the part of a run on one machine, if the run may continue on several. It starts from a checkpoint.

    `files` are the files of the checkpoint of `step`, in `folder`; none if the leg starts from the beginning. `caches`
    are compile caches in the same folder, from machines of the kinds `cached_on`. `spent_micros` is the upper bound of
    the cost of the legs before. `left_micros` is the rest of the cap for this leg, `left_gpu_hours` the rest of a cap
    in GPU-hours; None without such a cap.
    """

    number: int
    step: int
    files: tuple[LegFile, ...]
    folder: str
    spent_micros: Micros
    left_micros: Micros | None
    left_gpu_hours: float | None = None
    caches: tuple[LegFile, ...] = ()
    cached_on: tuple[str, ...] = ()

    def caches_for(self, offer: Offer) -> tuple[LegFile, ...]:
        """Return the compile caches that an offer's machine may use: those from machines of the same kind.

        They are code, so they are never sent to another provider's machine.
        """
        return self.caches if machine_kind(offer) in self.cached_on else ()


def machine_kind(offer: Offer) -> str:
    """Return a machine's kind: provider, tier and GPUs in a line. Machines of one kind can share compile caches."""
    return " ".join(filter(None, (offer.provider, offer.tier, offer.label)))


@dataclass(frozen=True)
class Workload:
    """The program that a machine starts for a job, and the uploads that it needs.

    `uploads` are files, folders or bytes, by their path on the machine. `argv` runs in `cwd` with `env` added to the
    machine's own variables. `{python}` stands for the Python with torch, or for any Python if the job needs no torch;
    `{agent}` stands for the Python that runs the agent. `has_runner` means that the first process is gpurun's runner,
    which runs the job as its child. `allowed` has the absolute local paths of files that are uploaded even if their
    name or content looks like a key. Every kind of job has the same interface: its log is on standard output, its
    progress in out/events.jsonl, its outputs are listed in out/MANIFEST.json, and it ends within the job's `save_s`
    after SIGTERM.
    """

    argv: tuple[str, ...]
    uploads: Mapping[str, Path | bytes]
    env: Mapping[str, str]
    has_runner: bool = False
    cwd: str = "bundle"
    allowed: tuple[str, ...] = ()


class Job(Frozen, ABC):
    """One job. Each kind of job is a subclass in the module `gpurun.jobs.KIND`.

    `recipe` is its name in lists, `recipe_sha256` the digest of everything that was requested of it. `resolved` are its
    settings as trackers log them, `parameters` the parameter count of its model, `trainer` names its trainer; each is
    empty if this kind of job has none. `form` is "rehearsal" if the small form of the recipe is trained.
    """

    kind: ClassVar[str]
    terms: ClassVar[JobTerms]
    sends_itself: ClassVar[bool] = True
    """Whether it may send data by itself, which gpurun does not count."""
    is_attended: ClassVar[bool] = False
    """Whether people log in to the machine and work on it: their work is activity, and the usual end is being idle."""

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
        """Return whether the Python that runs the job must have torch."""
        return False

    @property
    @abstractmethod
    def disk_gb(self) -> int:
        """Return the disk space that the job needs on the machine, in GB."""

    @property
    @abstractmethod
    def home_bytes(self) -> int:
        """Return the most bytes that are downloaded at the end."""

    @property
    @abstractmethod
    def save_s(self) -> int:
        """Return how many seconds the job gets after the stop signal, to save and to end."""

    @abstractmethod
    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        """Return the program for the plan's machine with `cpus` cores; `trainer` is the local folder of the trainer."""

    @abstractmethod
    def digest(self, plan: Plan, trainer: Path) -> str:
        """Return one digest of the uploaded program: the modules in `trainer`, or the job's own folder."""

    def program(self, plan: Plan, trainer: Path) -> Path:
        """Return the local folder that `digest` hashes."""
        return trainer

    def shipped(self, digest: str) -> Self:
        """Return the job with the fields that follow from the digest of its program."""
        return self

    @property
    def is_estimated(self) -> bool:
        """Return whether its time is estimated from a recipe before the start."""
        return self.terms.has_model

    @property
    def steps(self) -> int:
        """Return how many steps the job will take; 0 if unknown."""
        return 0

    @property
    def checkpoint_bytes(self) -> int:
        """Return the assumed size of one checkpoint: half of `home_bytes`, because two checkpoints are kept."""
        return self.home_bytes // 2

    @property
    def more_kept(self) -> int:
        """Return how many checkpoints are downloaded in addition to the latest and the best."""
        return 0

    def most_bytes(self, kind: str) -> int | None:
        """Return the most bytes that a file of a kind can have ("weights", "output"); None if unknown."""
        return self.disk_gb << 30

    @property
    def can_resume(self) -> bool:
        """Return whether the job can continue from its newest checkpoint on another machine."""
        return False

    @property
    def checkpoint_every(self) -> int:
        """Return the number of steps between two checkpoints; 0 if unknown."""
        return 0

    def resumed(self, leg: Leg) -> Self:
        """Return the job in the form that continues from the checkpoint of a leg."""
        return self

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the names of the secrets that it gets."""
        return ()

    @property
    def imports(self) -> tuple[str, ...]:
        """Return the modules that a machine's Python must be able to import, because they are not uploaded."""
        return ()

    @property
    def python(self) -> str:
        """Return the Python that runs it on this computer; "" for gpurun's own Python."""
        return ""

    @property
    def pip(self) -> tuple[str, ...]:
        """Return the pip requirements that are installed before it starts."""
        return ()

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables that the user set for the job."""
        return {}

    @property
    def argv(self) -> tuple[str, ...]:
        """Return the command as the user typed it; () if there is none."""
        return ()

    @property
    def challenge(self) -> str:
        """Return the job's challenge, as WORD:KEYID; "" if it has none."""
        return ""

    def code(self, plan: Plan, beside: Path) -> list[tuple[str, str]]:
        """Return (label, text) rows about the user's own code, for an evidence card.

        `beside` is the present path of the plan's `data.beside`. If the copy of the code in it has changed since the
        upload, the rows are left out.
        """
        return []

    def opened(self) -> dict[str, Any]:
        """Return the fields of this kind of job in `run.opened` and in the receipt."""
        return {"job": self.kind}

    def headline(self) -> list[str]:
        """Return the parts of the plan's line about the job, with its name first."""
        return [self.recipe]

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """Return the plan's words for the uploaded files, and its words with their digests."""
        return [], []

    def cures(self, message: str, log: str) -> Iterator[str]:
        """Yield possible remedies for a failure, given its last message and the end of its log, both untrusted."""
        yield from ()

    def flat(self) -> dict[str, Any]:
        """Return its part of plan.json, which `job_in` reads: the common fields, and in "job" the kind's own fields."""
        fields = self.model_dump(mode="json")
        of_all = {key: fields.pop(key) for key in Job.model_fields}
        return {**of_all, "job": {"kind": self.kind, **fields}}


_KINDS: dict[str, type[Job]] = {}
_KIND = re.compile(r"[a-z][a-z0-9_]{0,30}")


def job_class(kind: str) -> type[Job]:
    """Return the class of a kind of job, from `gpurun.jobs.KIND`; ValueError if this gpurun does not have the kind."""
    if kind not in _KINDS and _KIND.fullmatch(kind):
        try:
            import_module(f"gpurun.jobs.{kind}")
        except ModuleNotFoundError as error:
            raise ValueError(f"this gpurun has no job of kind {kind!r}") from error
    if kind not in _KINDS:
        raise ValueError(f"this gpurun has no job of kind {kind!r}")
    return _KINDS[kind]


def job_in(plan: Mapping[str, Any]) -> Job:
    """Return the job in the data of a plan.json.

    The fields of training jobs and commands are among the plan's own keys there, as in the oldest form of plan.json.
    """
    stated = plan.get("job")
    if isinstance(stated, Job):
        return stated
    if isinstance(stated, dict):
        return job_class(str(stated.get("kind"))).model_validate({**plan, **stated})
    return job_class("command" if plan.get("command") else "trainer").model_validate(dict(plan))


class Plan(Frozen):
    """A plan: a job, the offer for it, and the most that it may cost. It is shown, approved, and then never changed.

    `chosen` is the offer that is used, with time and cost. In JSON, the fields of `job` and `chosen` are among the
    plan's own, as in the oldest form of plan.json.
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
    """The digest of the job's uploaded program."""
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
    """The id of the mandate under which it was approved; "" if a person approved it."""
    leg: Leg | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest_fields_of_file(cls, data: Any) -> Any:
        """Return plan.json's data with the fields of job and chosen candidate moved into `job` and `chosen`."""
        if not isinstance(data, dict):
            return data
        parts: dict[str, Any] = {"job": job_in(data)}
        if "chosen" not in data:
            parts["chosen"] = {"finishes": True, **{key: data[key] for key in _CHOSEN if key in data}}
        return {key: data[key] for key in data if key not in _CHOSEN} | parts

    @model_validator(mode="after")
    def _check_has_lease(self) -> Plan:
        if self.chosen.lease is None or self.chosen.worst_micros is None:
            raise ValueError(f"{self.chosen.offer.label} has no lease")
        return self

    @model_serializer(mode="wrap")
    def _flatten(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = plain(self)
        if "job" in data:
            del data["job"]
            data = {**{key: data.pop(key) for key in ("v", "run", "mode") if key in data}, **self.job.flat(), **data}
        if "chosen" in data:
            parts = data.pop("chosen")
            data |= {key: parts[key] for key in _CHOSEN}
            data["expected_micros"] = self.expected_micros
        if not data.get("mandate"):  # The form of plan.json before mandates existed.
            data.pop("mandate", None)
        if self.leg is None:
            data.pop("leg", None)
        return data

    @property
    def offer(self) -> Offer:
        """Return the offer on which the job will run; it may be a machine that exists already."""
        return self.chosen.offer

    @property
    def estimate(self) -> Estimate:
        """Return the expected memory, speed and time on the chosen machine."""
        return self.chosen.estimate

    @property
    def enters_image(self) -> bool:
        """Return whether the user's command runs in a container on the machine; gpurun's programs run outside of it."""
        return bool(self.choices.image) and place_facts(self.offer.provider).enters_image

    @property
    def lease(self) -> Lease:
        """Return the time limits of the lease on the chosen machine."""
        assert self.chosen.lease is not None
        return self.chosen.lease

    @property
    def expected_micros(self) -> Micros:
        """Return the expected cost on the chosen machine; 0 if unknown."""
        return self.chosen.expected_micros or Micros(0)

    @property
    def worst_micros(self) -> Micros:
        """Return the most that the run can cost on the chosen machine."""
        return self.chosen.worst_micros or Micros(0)

    @property
    def approved(self) -> tuple[Candidate, ...]:
        """Return the offers that may be rented, in this order: the chosen one, then the others that the cap allows."""
        others = (
            candidate for candidate in self.candidates if candidate.lease is not None and candidate.offer != self.offer
        )
        return (self.chosen, *others) if self.mode is Mode.PAID else (self.chosen,)

    @property
    def most_micros(self) -> Micros:
        """Return the worst case of the most expensive approved offer: the amount that the user is asked to approve."""
        return max(candidate.worst_micros or Micros(0) for candidate in self.approved)

    @property
    def cap_left_micros(self) -> Micros | None:
        """Return the cap minus the upper bound of the cost of earlier machines; None if there is no cap."""
        return self.leg.left_micros if self.leg is not None else self.cap_micros

    def with_notes(self, *notes: str, warnings: Iterable[str] = ()) -> Plan:
        """Return the same plan with more notes (information) and warnings (possible harm to the user)."""
        update = {"notes": (*self.notes, *notes), "warnings": (*self.warnings, *warnings)}
        return self.model_copy(update=update)

    def with_chosen(self, candidate: Candidate) -> Plan:
        """Return the same plan on another of its approved offers; ValueError if the candidate was not approved."""
        if candidate.lease is None or candidate.worst_micros is None:
            raise ValueError(f"{candidate.offer.label} was not approved")
        processes = candidate.offer.gpu_count or self.processes
        return self.model_copy(update={"chosen": candidate, "processes": processes})


_CHOSEN = ("offer", "estimate", "lease", "expected_micros", "worst_micros")
"""The fields of the chosen candidate that are in plan.json."""
