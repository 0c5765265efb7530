"""The tables of recipe.json: one frozen dataclass a table, one field a key, every bound checked.

The defaults are those of recipe.toml and serve callers in Python; the file itself must hold every key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer import combinations
from trainer.strict import check as _check

__all__ = [
    "DataConfig",
    "EvalConfig",
    "HardwareConfig",
    "ModelConfig",
    "OptimConfig",
    "RehearsalConfig",
    "SampleConfig",
    "ScheduleConfig",
    "TrainConfig",
]

_INSIDE_DATA = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,79})*")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the network."""

    preset: str = "faithful"
    """"faithful": GPT-2 as nanoGPT and llm.c have it; "modern": cheaper to the same loss, and another network;
    "encoder-decoder": the Transformer that translates, `layers` on either side."""
    layers: int
    heads: int
    width: int
    context: int
    """Tokens the model sees at once; those of the longest sentence, on either side, where it translates."""
    vocab_size: int = 0
    """0: the tokeniser's, padded up to a multiple of 64."""
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    """The output head is the token embedding."""

    def __post_init__(self) -> None:
        known = self.preset in ("faithful", "modern", "encoder-decoder")
        _check(known, f'model.preset is "{self.preset}"; it must be "faithful", "modern" or "encoder-decoder"')
        for name in ("layers", "heads", "width", "context"):
            _check(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; it must be at least 1")
        _check(0 <= self.vocab_size <= 65536, f"model.vocab_size is {self.vocab_size}; uint16 shards allow 0 to 65536")
        _check(0.0 <= self.dropout < 1.0, f"model.dropout is {self.dropout}; it must be at least 0 and below 1")
        combinations.check_model(self)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from; the trainer itself reads only the shards."""

    source: str
    tokenizer: str
    vocab_size: int = 0
    """Tokens of a vocabulary that is trained on the text ("bpe"); 0: 8,192."""
    val_fraction: float = 0.1
    limit_mb: int = 0

    def __post_init__(self) -> None:
        combinations.check_data(self)
        _check(0.0 < self.val_fraction < 1.0, f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, or Muon for the matrices inside the blocks and AdamW for the rest."""

    kind: str = "adamw"
    """"adamw" or "muon"."""
    lr: float
    """AdamW's peak, and Muon's where `muon_lr` is 0: its updates are scaled to the size of AdamW's."""
    muon_lr: float = 0.0
    """Muon's peak; 0: `lr`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    """The gradient's largest norm; 0: off."""

    def __post_init__(self) -> None:
        _check(self.kind in ("adamw", "muon"), f'optim.kind is "{self.kind}"; it must be "adamw" or "muon"')
        _check(self.lr > 0, f"optim.lr is {self.lr}; it must be above 0")
        for name in ("beta1", "beta2"):
            _check(0.0 <= getattr(self, name) < 1.0, f"optim.{name} is {getattr(self, name)}; it must lie in 0 to 1")
        _check(self.eps > 0, f"optim.eps is {self.eps}; it must be above 0")
        for name in ("muon_lr", "weight_decay", "grad_clip"):
            _check(getattr(self, name) >= 0, f"optim.{name} is {getattr(self, name)}; it must not be negative")
        combinations.check_optim(self)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves over the steps."""

    kind: str
    """"cosine", "constant", "trapezoid" or "noam"."""
    warmup_steps: int = 0
    min_lr: float = 0.0
    cooldown_fraction: float = 0.0
    """The share of the steps, the last ones, in which a trapezoid falls."""

    def __post_init__(self) -> None:
        known = self.kind in ("cosine", "constant", "trapezoid", "noam")
        _check(known, f'schedule.kind is "{self.kind}"; it must be "cosine", "constant", "trapezoid" or "noam"')
        _check(self.warmup_steps >= 0, f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative")
        _check(self.min_lr >= 0, f"schedule.min_lr is {self.min_lr}; it must not be negative")
        fraction = self.cooldown_fraction
        _check(0.0 <= fraction <= 1.0, f"schedule.cooldown_fraction is {fraction}; it must lie between 0 and 1")
        combinations.check_schedule(self)

    def cooldown_steps(self, steps: int) -> int:
        """Return how many of a run's steps, the last ones, are the cool-down."""
        return round(self.cooldown_fraction * steps)


_TRAIN_WORDS = {
    "loop": ("own", "huggingface"),
    "precision": ("auto", "bf16", "fp16", "fp32"),
    "parallel": ("auto", "ddp", "fsdp"),
    "spike": ("off", "warn", "skip", "stop"),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what portions, and how exactly."""

    steps: int
    batch_tokens: int
    """Tokens an optimiser step, over all processes."""
    micro_batch: int
    """Sequences a process and micro-step, at most."""
    seed: int = 42
    loop: str = "own"
    """"own", or "huggingface": the same run by the Hugging Face Trainer, for comparison."""
    precision: str = "auto"
    """"auto": bf16 on cards that have it, fp16 with a scaled loss on those that have not, fp32 on a CPU."""
    compile: bool = False
    parallel: str = "auto"
    """Several cards hold the weights each ("ddp") or a part each ("fsdp"); "auto": the first where it fits."""
    init_from: str = ""
    """Weights to start from, a file or folder in the data folder; empty: freshly drawn ones."""
    spike: str = "warn"
    """What follows when loss or gradient jump: nothing, a warning, a step without effect, or a save and the end."""
    spike_z: float = 7.0
    """How many standard deviations above the last steps' mean a jump is."""
    label_smoothing: float = 0.0
    """The share of a label's probability that goes to all tokens alike; only for translation."""
    log_every: int = 10
    checkpoint_every: int

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "micro_batch", "log_every", "checkpoint_every"):
            _check(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; it must be at least 1")
        _check(self.steps <= 999_999, f"train.steps is {self.steps}; a checkpoint's name has six digits")
        _check(0 <= self.seed < 2**32, f"train.seed is {self.seed}; it must lie between 0 and 4294967295")
        for name, known in _TRAIN_WORDS.items():
            one_of = ", ".join(f'"{word}"' for word in known)
            value = getattr(self, name)
            _check(value in known, f'train.{name} is "{value}"; it must be one of {one_of}')
        _check(self.spike_z > 0, f"train.spike_z is {self.spike_z}; it must be above 0")
        share = self.label_smoothing
        _check(0.0 <= share < 1.0, f"train.label_smoothing is {share}; it must be at least 0 and below 1")
        inside = not self.init_from or _INSIDE_DATA.fullmatch(self.init_from) is not None
        _check(inside, f'train.init_from is "{self.init_from[:80]}"; it must be a name inside the data folder')


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often the validation loss is taken, and over how many tokens."""

    every: int
    tokens: int
    hellaswag_items: int = 0
    """Items of data/hellaswag.jsonl that are answered each time; 0: none."""

    def __post_init__(self) -> None:
        for name in ("every", "tokens"):
            _check(getattr(self, name) >= 1, f"eval.{name} is {getattr(self, name)}; it must be at least 1")
        _check(self.hellaswag_items >= 0, f"eval.hellaswag_items is {self.hellaswag_items}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What the model is asked to continue, or to translate, at every checkpoint."""

    prompts: tuple[str, ...]
    tokens: int
    temperature: float = 0.8
    top_k: int = 0
    beams: int = 1
    """Of a translation, which is searched and never drawn; 1: greedy search."""
    length_penalty: float = 0.6
    """The exponent of Wu et al. 2016 by which beams of different lengths are compared."""

    def __post_init__(self) -> None:
        for name in ("tokens", "temperature", "top_k", "length_penalty"):
            _check(getattr(self, name) >= 0, f"sample.{name} is {getattr(self, name)}; it must not be negative")
        _check(self.beams >= 1, f"sample.beams is {self.beams}; it must be at least 1")


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
