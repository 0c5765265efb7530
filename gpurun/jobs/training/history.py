"""Predicts the speed of a run from the tokens per second that the user's earlier runs reached on the same GPU.

A plan prefers the most similar earlier run to published figures. FLOP/s can be transferred between models of different
shapes, but less reliably the more they differ. So the predicted range widens with the difference, and a run that
differs by more than a factor of four is not used. If the file of earlier runs is unreadable, that is reported and the
file is ignored; history_file.py writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from statistics import median
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from gpurun.core.paths import Home, read_regular
from gpurun.core.places import place_facts
from gpurun.core.records import Frozen, Offer
from gpurun.core.run_plan import Request
from gpurun.core.uplink import Uplink
from gpurun.jobs.training.recipe import ModelConfig, ResolvedRecipe, read_model
from gpurun.providers.catalog import card_of

MOST_RUNS = 200
SPREAD = 0.05  # The relative difference in speed between two runs of the same training on machines of the same kind.
SPREAD_BY_DISTANCE = 0.25
SHORT_S, MOST_BY_SHORTNESS = 2.0, 0.25
"""`SHORT_S`: the seconds by which any training's length is uncertain. Runs of 12 to 20 s differed by 4 to 25 %.

`MOST_BY_SHORTNESS`: the largest relative uncertainty that follows from it.
"""
FURTHEST = log(4.0)
MOST_LOSSES = 32
LEAST_SENT_BYTES, MOST_UPLOADS = 20_000_000, 5
"""The smallest upload from which a connection's speed is measured, and how many of the latest uploads are used."""

Positive = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Word = Annotated[str, Field(max_length=200)]
Losses = tuple[tuple[Count, Annotated[float, Field(allow_inf_nan=False)]], ...]


class Strict(Frozen):
    """The base class of the history file's records. A value of the wrong type is an error."""

    model_config = ConfigDict(strict=True)


class Prior(Strict):
    """One earlier run: what it trained, on which GPU, and how long that took.

    `machine` identifies the CPU, and is empty for a GPU. `flops_per_token` is the plan's figure (estimate.py).
    `start_s` is the time from the trainer's start to the end of its first step. `val_losses` are pairs (step, loss).
    `sent_bytes` is the size of the upload to a rented machine over SSH, and `sent_s` its duration; both are 0 if the
    upload was to a user's own machine or used a bucket.
    """

    run: Word
    wall: float
    card: Word
    gpu_count: int = Field(ge=0, le=1024)
    nodes: int = Field(default=1, ge=1, le=1024)
    processes: Count
    machine: Word = ""
    recipe_sha256: Word
    data_sha256: Word
    model: Annotated[ModelConfig, PlainValidator(read_model), PlainSerializer(vars)]
    vocab_size: Count
    flops_per_token: Positive
    micro_batch: Count
    batch_tokens: Count
    precision: Word
    compile: bool
    loop: Word
    torch: Word
    steps: Count
    step_s: Positive
    tokens_per_s: Positive
    start_s: Annotated[float, Field(ge=0, lt=1e9)]
    memory_peak_bytes: Count | None
    val_losses: Annotated[Losses, Field(max_length=MOST_LOSSES, strict=False)] = ()
    sent_bytes: int = Field(default=0, ge=0, le=2**53)
    sent_s: Annotated[float, Field(ge=0, lt=1e9)] = 0.0


class Priors(Strict):
    """The content of the file of earlier runs, the oldest run first."""

    v: Literal[1] = 1
    runs: Annotated[tuple[Prior, ...], Field(max_length=MOST_RUNS, strict=False)] = ()

    def with_run(self, prior: Prior) -> Priors:
        """Return the records with this run added, or replaced if it exists. Above the limit, the oldest are dropped."""
        others = [other for other in self.runs if other.run != prior.run]
        return Priors(runs=tuple([*others, prior][-MOST_RUNS:]))


@dataclass(frozen=True)
class Nearest:
    """The earlier run most similar to a plan, the speed predicted from it (tokens/s), and its relative uncertainty."""

    prior: Prior
    tokens_per_s: float
    spread: float
    is_same: bool


def nearest_run(
    priors: Priors, recipe: ResolvedRecipe, offer: Offer, micro_batch: int, flops_per_token: float, machine: str
) -> Nearest | None:
    """Return the most similar run on the offer's GPU with the same precision, compilation and loop.

    Return None if no run is similar enough. If two runs are equally similar, the later one is used. `machine`
    identifies the offer's CPU.
    """
    train = recipe.tables.train
    model = recipe.tables.model
    best = None
    setup = (offer.gpu, "" if offer.gpu_count else machine, precision_on(recipe, offer), train.compile, train.loop)
    for run in priors.runs:
        if (run.card, run.machine, run.precision, run.compile, run.loop) != setup or run.model.preset != model.preset:
            continue
        if bool(run.gpu_count) != bool(offer.gpu_count) or run.nodes != offer.nodes:
            continue
        if not offer.gpu_count and run.processes != recipe.processes:
            continue
        count = max(1, offer.gpu_count) / max(1, run.gpu_count)
        tokens = micro_batch * model.context / (run.micro_batch * run.model.context)
        flops = flops_per_token / run.flops_per_token
        distance = abs(log(flops)) + 0.5 * abs(log(tokens)) + 0.3 * abs(log(count))
        distance += 0.1 * (run.model.layers != model.layers or run.model.dropout != model.dropout)
        if distance <= FURTHEST and (best is None or distance <= best[0]):
            best = (distance, run, run.tokens_per_s / flops * count)
    if best is None:
        return None
    distance, prior, tokens_per_s = best
    short = min(MOST_BY_SHORTNESS, SHORT_S / (prior.steps * prior.step_s))
    return Nearest(prior, tokens_per_s, SPREAD + short + SPREAD_BY_DISTANCE * distance, is_same=distance < 1e-9)


def precision_on(recipe: ResolvedRecipe, offer: Offer) -> str:
    """Return the precision that the trainer would choose on an offer, by the rule in trainer/distributed.py."""
    precision = recipe.tables.train.precision
    if precision != "auto":
        return precision
    if not offer.gpu_count:
        return "fp32"
    card = card_of(offer.gpu)
    return "fp16" if card is not None and not card.bf16 else "bf16"


def describe_machine(offer: Offer, cpu_cores: int) -> str:
    """Return a text that identifies an offer's CPU; for this computer, the number of cores."""
    return f"{cpu_cores} cores here" if place_facts(offer.provider).is_here else f"{offer.provider} {offer.type_id}"


def same_recipe(priors: Priors, recipe_sha256: str, data_sha256: str = "") -> Prior | None:
    """Return the latest run with a loss curve of exactly this recipe, on these shards if `data_sha256` is given."""
    found = [run for run in priors.runs if run.recipe_sha256 == recipe_sha256 and run.val_losses]
    found = [run for run in found if not data_sha256 or run.data_sha256 == data_sha256]
    return found[-1] if found else None


def loss_at(prior: Prior, step: int) -> float | None:
    """Return an earlier run's validation loss at a step, interpolated; None outside the measured steps."""
    before = [point for point in prior.val_losses if point[0] <= step]
    after = [point for point in prior.val_losses if point[0] >= step]
    if not before or not after:
        return None
    (low, first), (high, last) = before[-1], after[0]
    return first if high == low else first + (last - first) * (step - low) / (high - low)


def uplink_of(request: Request, priors: Priors) -> Uplink:
    """Return this computer's upload speed: the configured speed, else the median of the last large uploads.

    The speed was measured on compressed bytes, but a plan counts uncompressed bytes, so its upload takes less time than
    planned.
    """
    if request.uplink_mbit is not None:
        return Uplink(bits_per_s=1e6 * request.uplink_mbit, basis="as configured")
    sent = [8 * run.sent_bytes / run.sent_s for run in priors.runs if run.sent_bytes >= LEAST_SENT_BYTES and run.sent_s]
    if not sent:
        return Uplink()
    last = sent[-MOST_UPLOADS:]
    runs = "an earlier run" if len(last) == 1 else f"{len(last)} earlier runs"
    return Uplink(bits_per_s=median(last), basis=f"as in {runs}")


_MOST_BYTES = 8 << 20


def load_priors(home: Home) -> tuple[Priors, str]:
    """Return the records of earlier runs and ""; if their file is damaged, no records and a note about the damage."""
    try:
        if home.priors.stat().st_size > _MOST_BYTES:
            return Priors(), _damaged_file_note(home, f"it has more than {_MOST_BYTES >> 20} MiB")
        return Priors.from_json(read_regular(home.priors)), ""
    except FileNotFoundError:
        return Priors(), ""
    except OSError as error:
        return Priors(), _damaged_file_note(home, str(error.strerror))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return Priors(), _damaged_file_note(home, f"{where}: {first['msg']}" if where else first["msg"])


def _damaged_file_note(home: Home, why: str) -> str:
    from gpurun.core.untrusted import plain_line

    return (
        f"The file of your earlier runs' speeds ({home.priors}) cannot be read and is ignored: {plain_line(why, 120)}."
    )
