"""The recipe: the only schema of recipe.toml and recipe.json (docs/FORMATS.md), with all bounds and cross-checks.

It needs only the standard library, because gpurun reads recipes with it before anything is rented, and the trainer on
the machine. A table is a dataclass and a key is a field, whose annotation defines the allowed values.
trainer/recipe_rules.py and `_conflicts` define which values fit together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from trainer.recipe_rules import ONLY
from trainer.recipe_rules import PAIR_TOKENIZERS as PAIR_TOKENIZERS


class RecipeError(ValueError):
    """Raised for an invalid recipe; the text is a sentence without its full stop.

    `kind` is "unknown_key", "missing_key", "bad_value" or "does_not_add_up". `key` is the dotted key, if the error
    concerns a key. `known` are the dotted keys of the table that has an unknown key.
    """

    def __init__(self, kind: str, sentence: str, key: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.kind, self.key, self.known = kind, key, known


@dataclass(frozen=True)
class Must:
    """A condition on a value: `holds` tests it, and `be` completes the sentence "it must be …"."""

    holds: Callable[[Any], Any]
    be: str


_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}"  # No hidden file, and nothing outside the folder.
_INSIDE = re.compile(f"({_NAME}(/{_NAME})*)?")
Whole = Annotated[int, Must(lambda x: 1 <= x <= 2**53, f"at least 1 and at most {2**53}")]
Count = Annotated[int, Must(lambda x: 0 <= x <= 2**53, f"at least 0 and at most {2**53}")]
# Ten times the largest known values, or more; a larger number is a typing error, and would take forever.
Layers = Annotated[int, Must(lambda x: 1 <= x <= 10_000, "at least 1 and at most 10000")]
Width = Annotated[int, Must(lambda x: 1 <= x <= 2**20, f"at least 1 and at most {2**20}")]
Context = Annotated[int, Must(lambda x: 1 <= x <= 2**24, f"at least 1 and at most {2**24}")]
BatchTokens = Annotated[int, Must(lambda x: 1 <= x <= 2**32, f"at least 1 and at most {2**32}")]
Steps = Annotated[int, Must(lambda x: 1 <= x <= 999_999, "at least 1 and at most 999999: checkpoints have 6 digits")]
Seed = Annotated[int, Must(lambda x: 0 <= x < 2**63, f"at least 0 and below {2**63}")]
Rows = Annotated[int, Must(lambda x: 0 <= x <= 65_536, "at least 0 and at most 65536, as shards are of uint16")]
Trained = Annotated[int, Must(lambda x: x == 0 or 257 <= x <= 50_257, "0, or lie between 257 and 50257")]
Part = Annotated[float, Must(lambda x: 0 <= x < 1, "at least 0 and below 1")]
Kept = Annotated[int, Must(lambda x: 0 <= x <= 50, "at least 0 and at most 50")]
HeldOut = Annotated[float, Must(lambda x: 0 < x < 1, "above 0 and below 1")]
Share = Annotated[float, Must(lambda x: 0 <= x <= 1, "at least 0 and at most 1")]
Positive = Annotated[float, Must(lambda x: x > 0, "above 0")]
NotNegative = Annotated[float, Must(lambda x: x >= 0, "at least 0")]
Turned = Annotated[float, Must(lambda x: 0 < x <= 1, "above 0 and at most 1")]
Text = Annotated[str, Must(len, "the name of a text")]
InsideData = Annotated[str, Must(_INSIDE.fullmatch, "a name inside the data folder")]
Challenge = Annotated[str, Must(re.compile(r"(\w[\w.-]{3,63}:[0-9a-f]{64})?", re.A).fullmatch, "a WORD:KEYID")]
Order = Literal["permuted", "in_order"]
Overlay = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the network: GPT-2's, one that reaches the same loss for less, or a translator's."""

    preset: Literal["faithful", "modern", "encoder-decoder"] = "faithful"
    layers: Layers
    heads: Layers
    width: Width
    context: Context  # Tokens that the model sees together; for translation, the longest sentence on either side.
    vocab_size: Rows = 0  # 0: the tokeniser's, padded up to a multiple of 64.
    dropout: Part = 0.0
    bias: bool = True
    tied: bool = True  # The output head is the token embedding.
    softcap: NotNegative = 0.0  # The bound of the logits; 0: none.
    softcap_by: Literal["tanh", "root"] = "tanh"  # c tanh(x / c), or c x / sqrt(x^2 + c^2).
    rotary: Turned = 1.0  # The share of a head's channels that is rotated by position.
    rotary_base: Positive = 10_000.0  # The slowest pair of channels turns about 1 / rotary_base radians a position.
    attention_scale: NotNegative = 0.0  # The factor of the scores; 0: 1 / sqrt(a head's channels).
    value_mix: bool = False  # Each layer's values include a learned part of the first layer's.
    gains: bool = False  # Each RMSNorm has a learned gain per channel.
    init_gain: Positive = 1.0  # Standard deviation init_gain / sqrt(inputs) for matrices that read the stream.
    stream: Literal["fp32", "bf16"] = "fp32"  # The dtype of residual stream and norms, if products are in bf16.


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of the text; the trainer itself reads only the shards."""

    source: Text = "stdlib"
    tokenizer: Literal["char", "gpt2", "bpe", "char-pairs", "word-pairs"]
    vocab_size: Trained = 0  # Tokens of a vocabulary that is trained on the text ("bpe"); 0: 8,192.
    val_fraction: HeldOut = 0.1
    limit_mb: Count = 0  # 0: all of the text.
    order: Order = "permuted"  # The order in which training reads the windows of the text.


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, or Muon for the matrices inside the blocks and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Positive  # AdamW's highest rate, and Muon's if `muon_lr` is 0.
    muon_lr: NotNegative = 0.0
    embed_lr: NotNegative = 0.0  # The highest rate of the token embedding; 0: `lr`.
    head_lr: NotNegative = 0.0  # The highest rate of a separate output head; 0: `lr`.
    gain_lr: NotNegative = 0.0  # The highest rate of gains and biases; 0: `lr`.
    beta1: Part = 0.9
    beta2: Part = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    muon_weight_decay: NotNegative = 0.0  # The weight decay of Muon's matrices; 0: `weight_decay`.
    embed_weight_decay: NotNegative = 0.0  # The weight decay of the token embedding; 0: `weight_decay`.
    gain_weight_decay: NotNegative = 0.0  # The weight decay of gains and biases; 0: none.
    cautious: bool = False  # Muon's matrices decay only where the step also moves them towards zero.
    orthogonal: Literal["newton-schulz", "newton-schulz-12", "polar-express"] = "newton-schulz"  # Muon's iterations.
    muon_scale: Literal["adamw", "aspect"] = "adamw"  # A step's size: AdamW's, or sqrt(max(1, rows / columns)).
    muon_momentum_warmup: Count = 0  # Steps in which Muon's momentum rises from 0.85 to 0.95.
    grad_clip: NotNegative = 1.0  # The largest norm of the gradient; 0: no limit.


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes over the steps."""

    kind: Literal["cosine", "constant", "trapezoid", "noam"] = "cosine"
    warmup_steps: Count = 0
    min_lr: NotNegative = 0.0
    cooldown_fraction: Share = 0.0  # The share of the steps, at the end, in which a trapezoid falls.

    def cooldown_steps(self, steps: int) -> int:
        """Return how many of a run's last steps form the cool-down."""
        return round(self.cooldown_fraction * steps)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, with which batches, and how precisely to train."""

    steps: Steps
    batch_tokens: BatchTokens  # The tokens of an optimiser step, over all processes.
    micro_batch: Whole  # The most sequences per process and micro-step.
    seed: Seed = 42
    challenge: Challenge = ""  # A teacher's word and a key's id, which give the seed (`recipe_file.seed_of`).
    loop: Literal["own", "huggingface"] = "own"  # "huggingface": the Hugging Face Trainer, for comparison.
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # auto: bf16 or else fp16 on a GPU, else fp32.
    compile: bool = False
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # Each GPU holds all weights, or a part; auto: all, if they fit.
    init_from: InsideData = ""  # Weights to start from, a file or folder; empty: random weights.
    spike: Literal["off", "warn", "skip", "stop"] = "warn"  # If the loss or the gradient jumps; "stop" saves first.
    spike_z: Positive = 7.0  # How many standard deviations above the last steps' mean a jump is.
    label_smoothing: Part = 0.0  # The share of a label's probability that goes to all tokens equally.
    log_every: Whole = 10
    checkpoint_every: Whole
    keep_checkpoints: Kept = 0  # Earlier checkpoints that are kept, spread over the run, to replay it.


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often the validation loss is computed, and over how many tokens."""

    every: Whole
    tokens: Whole
    order: Order = "permuted"  # Draw the tokens from the whole split, or use its first ones.
    hellaswag_items: Count = 0  # Items of data/hellaswag.jsonl that are answered each time; 0: none.
    core: Count = 0  # Items of each task of CORE (data/core.jsonl) that are answered after the last step; 0: none.


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The prompts that the model continues, or translates, at every checkpoint."""

    prompts: tuple[str, ...]
    tokens: Count
    temperature: NotNegative = 0.8
    top_k: Count = 0
    beams: Whole = 1  # For translation, which searches and never draws; 1: greedy search.
    length_penalty: NotNegative = 0.6  # The exponent (Wu et al. 2016) by which beams of different lengths are compared.


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The hardware that the recipe is written for, and what to do without CUDA; the trainer uses what it finds."""

    gpu: str = "any"
    disk_gb: Whole
    on_cpu: Literal["as_written", "rehearsal", "refuse"]


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig:
    """The values that a rehearsal replaces; `recipe_file.laid_over` applies them."""

    processes: Whole = 1
    model: Overlay = field(default_factory=dict)
    data: Overlay = field(default_factory=dict)
    optim: Overlay = field(default_factory=dict)
    schedule: Overlay = field(default_factory=dict)
    train: Overlay = field(default_factory=dict)
    eval: Overlay = field(default_factory=dict)
    sample: Overlay = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe. `parse_recipe` checks it; the constructor does not."""

    about: str = ""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    eval: EvalConfig
    sample: SampleConfig
    hardware: HardwareConfig
    rehearsal: RehearsalConfig = RehearsalConfig()

    def as_record(self) -> dict[str, Any]:
        """Return the recipe as recipe.json holds it, with the rehearsal."""
        record = {name: dict(vars(part)) if is_dataclass(part) else part for name, part in vars(self).items()}
        record["sample"]["prompts"] = list(self.sample.prompts)
        return record


_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_hints = cache(get_type_hints)
TABLES: dict[str, Any] = {name: kind for name, kind in _hints(Recipe).items() if name not in ("about", "rehearsal")}
"""The tables of recipe.json, in order."""
MOST_SAMPLES = 9_000  # Per run, because a valid manifest lists at most so many files besides its checkpoints.
REHEARSED = tuple(name for name in TABLES if name in _hints(RehearsalConfig))  # What a rehearsal may change.


def parse_recipe(record: Any, *, is_whole: bool = True) -> Recipe:
    """Return the recipe from decoded JSON or TOML; raise RecipeError for the first error.

    With `is_whole`, as for recipe.json, only the rehearsal may be missing; otherwise, missing keys get their defaults.
    """
    recipe: Recipe = read_table(Recipe, record, "", is_whole=is_whole)
    for name in REHEARSED:
        _check_names(getattr(recipe.rehearsal, name), TABLES[name], f"rehearsal.{name}.")
    for sentence in _conflicts(recipe):
        raise RecipeError("does_not_add_up", sentence)
    return recipe


def read_table(cls: Any, table: Any, where: str, *, is_whole: bool = True) -> Any:
    """Return an instance of the dataclass `cls` from a table, whose dotted name is `where`.

    Raise RecipeError if a key is unknown or missing, or a value is out of its bounds.
    """
    if not isinstance(table, dict):
        raise RecipeError("bad_value", f"{where or 'the recipe'} must be a table", where)
    dot = f"{where}." if where else ""
    _check_names(table, cls, dot)
    kinds, values = _hints(cls, include_extras=True), {}
    for key in fields(cls):
        has_default = key.default is not MISSING or key.default_factory is not MISSING
        if key.name in table:
            values[key.name] = _read(kinds[key.name], table[key.name], dot + key.name, is_whole)
        elif not has_default or (is_whole and "rehearsal" not in (where, key.name)):
            raise RecipeError("missing_key", f"missing key {dot}{key.name}", f"{dot}{key.name}")
    return cls(**values)


def _check_names(table: Mapping[str, Any], cls: Any, dot: str) -> None:
    known = tuple(f"{dot}{key.name}" for key in fields(cls))
    for key in (f"{dot}{name}" for name in table):
        if key not in known:
            raise unknown_key(key, known)


def unknown_key(key: str, known: tuple[str, ...]) -> RecipeError:
    """Return the error for an unknown key, with the nearest known key."""
    from difflib import get_close_matches  # Needed only for errors.

    meant = "".join(f"; did you mean {near}?" for near in get_close_matches(key, known, n=1))
    return RecipeError("unknown_key", f"unknown key {key}{meant}", key, known)


def _read(kind: Any, value: Any, where: str, is_whole: bool) -> Any:
    """Return `value` as `kind`, or raise RecipeError. An integer is a number too; true is not 1; NaN is refused."""
    kind, bound = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
    if is_dataclass(kind):
        return read_table(kind, value, where, is_whole=is_whole)
    must = ""
    if kind == Overlay:
        must = "" if isinstance(value, dict) else "a table"
    elif kind == tuple[str, ...]:
        is_right = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        must, value = ("", tuple(value)) if is_right else ("a list of strings", value)
    elif get_origin(kind) is Literal:
        must = "" if value in get_args(kind) else " or ".join(f'"{word}"' for word in get_args(kind))
    elif kind is float and type(value) in (int, float):
        must, value = ("", float(value)) if abs(value) < 2**1023 else ("a finite number", value)
    elif type(value) is not kind:
        must = _WORDS[kind]
    if must := must or ("" if bound is None or bound.holds(value) else bound.be):
        raise RecipeError("bad_value", f"{where} is {_shown(value)}; it must be {must}", where)
    return value


def _shown(value: Any) -> str:
    """Return a value as a recipe shows it, shortened if it is long."""
    text = str(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence, without its full stop, for every two values that do not fit together."""
    model, schedule, train, sample = recipe.model, recipe.schedule, recipe.train, recipe.sample
    each, left = divmod(model.width, model.heads)
    if left:
        yield f"model.width {model.width} cannot be shared equally by model.heads {model.heads}"
    if model.preset == "modern" and each % 2:
        yield f"model.width {model.width} by model.heads {model.heads} is {each}; a rotation needs an even number"
    for key, values, others, why in ONLY:
        first = attrgetter(key)(recipe)
        for other, allowed in others.items() if first in values else ():
            if (second := attrgetter(other)(recipe)) not in allowed:
                yield f"{other} is {_shown(second)}, but {why.format(_shown(first))}"
    if schedule.kind == "trapezoid" and not schedule.cooldown_fraction:
        yield 'schedule.kind "trapezoid" needs a schedule.cooldown_fraction above 0'
    if schedule.kind == "noam" and not schedule.warmup_steps:
        yield 'schedule.kind "noam" needs a schedule.warmup_steps of at least 1'
    if schedule.min_lr > recipe.optim.lr:
        yield f"schedule.min_lr {schedule.min_lr} is above optim.lr {recipe.optim.lr}"
    warmup, cooldown = schedule.warmup_steps, schedule.cooldown_steps(train.steps)
    if warmup + cooldown > train.steps:
        both = f" and a cool-down of {cooldown} steps are" if warmup <= train.steps else " is"
        yield f"schedule.warmup_steps {warmup}{both} more than train.steps {train.steps}"
    prompts, checkpoints = len(sample.prompts), -(-train.steps // train.checkpoint_every)
    if prompts * checkpoints > MOST_SAMPLES:
        many = f"{prompts} sample.prompts at each of {checkpoints} checkpoints make {prompts * checkpoints} samples"
        yield f"{many}; at most {MOST_SAMPLES} come home"


ATTENTIONS = {"faithful": 1, "modern": 1, "encoder-decoder": 3}  # In a layer, or in one layer on each side.


def padded_vocab(model: ModelConfig, vocab_size: int) -> int:
    """Return the rows of the embedding: the model's own number, or the tokeniser's padded to a multiple of 64."""
    if not model.vocab_size and vocab_size < 1:
        raise ValueError("a model without a vocabulary size needs the tokeniser's")
    return model.vocab_size or -(-vocab_size // 64) * 64


def parameters_of(model: ModelConfig, vocab_size: int = 0) -> int:
    """Return the number of parameters, embeddings included; `vocab_size` is the tokeniser's, if the model's is 0."""
    vocab, width = padded_vocab(model, vocab_size), model.width
    if model.preset == "modern":  # No learned positions; with mixed values, two scalars per layer.
        layer = 12 * width * width + 2 * model.value_mix + (9 * width if model.bias else 0)
        own = 2 * (model.layers + 1) * width if model.gains else 0
        return 2 * vocab * width + model.layers * layer + own + (vocab if model.bias else 0)
    norm = 2 * width if model.bias else width
    if model.preset == "encoder-decoder":  # A layer on each side; the decoder's has a second attention.
        layer = 5 * norm + 28 * width * width + (22 * width if model.bias else 0)
        return vocab * width + model.layers * layer + 2 * norm
    layer = 2 * norm + 12 * width * width + (9 * width if model.bias else 0)
    embeddings = (vocab + model.context) * width
    return embeddings + model.layers * layer + norm + (0 if model.tied else vocab * width)


def flops_per_token(model: ModelConfig, vocab_size: int = 0) -> int:
    """Return the training FLOPs (forward and backward) per token: 6 N + 12 L C T (PaLM, appendix B).

    N counts the weights of matrix products: neither positions, nor the input embedding if the head is separate.
    """
    looked_up = model.context * model.width if model.preset == "faithful" else 0
    looked_up += 0 if model.tied else padded_vocab(model, vocab_size) * model.width
    attended = ATTENTIONS[model.preset] * model.layers * model.width * model.context
    return 6 * (parameters_of(model, vocab_size) - looked_up) + 12 * attended
