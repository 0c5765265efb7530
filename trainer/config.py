"""recipe.json as frozen dataclasses: one class a table, one field a key, checked at the door.

The defaults are those of recipe.toml and serve callers in Python; the file itself must hold every key.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from trainer.errors import Refused

__all__ = [
    "DataConfig",
    "EvalConfig",
    "HardwareConfig",
    "ModelConfig",
    "OptimConfig",
    "Recipe",
    "RehearsalConfig",
    "SampleConfig",
    "ScheduleConfig",
    "TrainConfig",
    "differing_keys",
    "load_recipe",
    "parse_recipe",
]


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise Refused(sentence)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the network."""

    preset: str = "faithful"
    """GPT-2 as nanoGPT and llm.c have it."""
    layers: int
    heads: int
    width: int
    context: int
    """Tokens the model sees at once."""
    vocab_size: int = 0
    """0: the tokeniser's, padded up to a multiple of 64."""
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    """The output head is the token embedding."""

    def __post_init__(self) -> None:
        _check(self.preset == "faithful", f'model.preset is "{self.preset}"; this trainer knows "faithful"')
        for name in ("layers", "heads", "width", "context"):
            _check(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; it must be at least 1")
        whole = self.width % self.heads == 0
        _check(whole, f"model.width {self.width} cannot be shared equally by model.heads {self.heads}")
        _check(0 <= self.vocab_size <= 65536, f"model.vocab_size is {self.vocab_size}; uint16 shards allow 0 to 65536")
        _check(0.0 <= self.dropout < 1.0, f"model.dropout is {self.dropout}; it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from; the trainer itself reads only the shards."""

    source: str
    tokenizer: str
    val_fraction: float = 0.1
    limit_mb: int = 0

    def __post_init__(self) -> None:
        _check(0.0 < self.val_fraction < 1.0, f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    """The gradient's largest norm; 0: off."""

    def __post_init__(self) -> None:
        _check(self.lr > 0, f"optim.lr is {self.lr}; it must be above 0")
        for name in ("beta1", "beta2"):
            _check(0.0 <= getattr(self, name) < 1.0, f"optim.{name} is {getattr(self, name)}; it must lie in 0 to 1")
        _check(self.eps > 0, f"optim.eps is {self.eps}; it must be above 0")
        for name in ("weight_decay", "grad_clip"):
            _check(getattr(self, name) >= 0, f"optim.{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves over the steps."""

    kind: str
    warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        known = self.kind in ("cosine", "constant")
        _check(known, f'schedule.kind is "{self.kind}"; it must be "cosine" or "constant"')
        _check(self.warmup_steps >= 0, f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative")
        _check(self.min_lr >= 0, f"schedule.min_lr is {self.min_lr}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what portions, and how exactly."""

    steps: int
    batch_tokens: int
    """Tokens an optimiser step, over all processes."""
    micro_batch: int
    """Sequences a process and micro-step, at most."""
    seed: int = 42
    precision: str = "auto"
    compile: bool = False
    log_every: int = 10
    checkpoint_every: int

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "micro_batch", "log_every", "checkpoint_every"):
            _check(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; it must be at least 1")
        _check(self.steps <= 999_999, f"train.steps is {self.steps}; a checkpoint's name has six digits")
        _check(0 <= self.seed < 2**32, f"train.seed is {self.seed}; it must lie between 0 and 4294967295")
        known = self.precision in ("auto", "bf16", "fp32")
        _check(known, f'train.precision is "{self.precision}"; it must be "auto", "bf16" or "fp32"')


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often the validation loss is taken, and over how many tokens."""

    every: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("every", "tokens"):
            _check(getattr(self, name) >= 1, f"eval.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What the model is asked to continue at every checkpoint."""

    prompts: tuple[str, ...]
    tokens: int
    temperature: float = 0.8
    top_k: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "temperature", "top_k"):
            _check(getattr(self, name) >= 0, f"sample.{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """What was rented for it; the trainer uses what it finds."""

    gpu: str = "1xA100"
    disk_gb: int
    on_cpu: str

    def __post_init__(self) -> None:
        known = self.on_cpu in ("as_written", "rehearsal", "refuse")
        _check(known, f'hardware.on_cpu is "{self.on_cpu}"; it must be "as_written", "rehearsal" or "refuse"')


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig:
    """What a rehearsal replaces; it has been applied before the trainer sees the recipe."""

    processes: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    eval: Mapping[str, Any] = field(default_factory=dict)
    sample: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole recipe, resolved."""

    about: str
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    train: TrainConfig
    eval: EvalConfig
    sample: SampleConfig
    hardware: HardwareConfig
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)

    def __post_init__(self) -> None:
        warmup, steps = self.schedule.warmup_steps, self.train.steps
        _check(warmup <= steps, f"schedule.warmup_steps {warmup} is more than train.steps {steps}")
        low, high = self.schedule.min_lr, self.optim.lr
        _check(low <= high, f"schedule.min_lr {low} is above optim.lr {high}")

    def as_record(self) -> dict[str, Any]:
        """The recipe as recipe.json holds it."""
        record = asdict(self)
        record["sample"]["prompts"] = list(self.sample.prompts)
        return record


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _value(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`, or refuse; an integer serves as a number, but true is not 1 and NaN is nothing."""
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return _table(kind, value, where)
    if kind == tuple[str, ...]:
        _check(isinstance(value, list) and all(isinstance(v, str) for v in value), f"{where} must be a list of strings")
        return tuple(value)
    if kind == Mapping[str, Any]:
        _check(isinstance(value, dict), f"{where} must be a table")
        return value
    if kind is float and type(value) in (int, float):
        _check(math.isfinite(value), f"{where} is {value}; it must be a finite number")
        return float(value)
    _check(type(value) is kind, f"{where} is {json.dumps(value)}; it must be {_NAMES[kind]}")
    return value


def _table(cls: type, table: Any, where: str) -> Any:
    """Build one dataclass from one table; every key must be known and present."""
    _check(isinstance(table, dict), f"{where or 'the recipe'} must be a table")
    kinds, dot = get_type_hints(cls), f"{where}." if where else ""
    for key in table:
        near = difflib.get_close_matches(key, kinds, n=1)
        _check(key in kinds, f"unknown key {dot}{key}" + (f"; did you mean {dot}{near[0]}?" if near else ""))
    # Only the overlays of a rehearsal may be absent: an overlay that replaces nothing says nothing.
    optional = {f.name for f in fields(cls) if f.default_factory is not MISSING}
    missing = [key for key in kinds if key not in table and key not in optional]
    _check(not missing, f"missing key {dot}{missing[0]}" if missing else "")
    return cls(**{key: _value(kinds[key], table[key], dot + key) for key in table})


def parse_recipe(record: Any) -> Recipe:
    """Return the recipe that a decoded recipe.json holds; raise Refused naming the first key that is wrong."""
    recipe: Recipe = _table(Recipe, record, "")
    for name, overlay in vars(recipe.rehearsal).items():
        if name != "processes":
            known = get_type_hints(get_type_hints(Recipe)[name])
            for key in overlay:
                _check(key in known, f"unknown key rehearsal.{name}.{key}")
    return recipe


def load_recipe(path: Path) -> Recipe:
    """Read and check recipe.json."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"the recipe {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Refused(f"the recipe {path} is not JSON: {error}") from error
    return parse_recipe(record)


_MAY_CHANGE = {"train.micro_batch", "train.compile", "train.log_every", "train.checkpoint_every", "eval.every"}


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which two recipe records would train differently, sorted.

    How often something is logged, saved or sampled, how the batch is cut, and what hardware was asked for may differ.
    """
    different = []
    for table in ("model", "data", "optim", "schedule", "train", "eval"):
        before, after = old.get(table, {}), new.get(table, {})
        for key in sorted({*before, *after}):
            if f"{table}.{key}" not in _MAY_CHANGE and before.get(key) != after.get(key):
                different.append(f"{table}.{key}")
    return different
