"""The tables of a recipe (docs/FORMATS.md): one class a table, one field a key, every bound checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gpurun.core.model import Frozen

Whole = Annotated[int, Field(ge=1, le=2**53)]
Count = Annotated[int, Field(ge=0, le=2**53)]
# Ten times what anybody has trained, or more; what is larger is a slip of the finger, and there would be no end to it.
Tall = Annotated[int, Field(ge=1, le=10_000)]
Wide = Annotated[int, Field(ge=1, le=2**20)]
Long = Annotated[int, Field(ge=1, le=2**24)]
BatchTokens = Annotated[int, Field(ge=1, le=2**32)]
Share = Annotated[float, Field(gt=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Overlay = dict[str, Any]
INSIDE_DATA = r"^$|^[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,79})*$"
"""A file or folder below the data folder; nothing hidden, no way out."""


class Table(Frozen):
    """A table of a recipe: a value of another type is an error, and so is one that is not finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class ModelTable(Table):
    """The shape of the network."""

    preset: Literal["faithful", "modern", "encoder-decoder"] = "faithful"
    layers: Tall
    heads: Tall
    width: Wide
    context: Long
    vocab_size: int = Field(default=0, ge=0, le=65_536)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    bias: bool = True
    tied: bool = True


class DataTable(Table):
    """The text, its tokeniser (how many tokens, if trained), what is held out, how much is taken (MB; 0: all)."""

    source: str = Field(default="stdlib", min_length=1)
    tokenizer: Literal["char", "gpt2", "bpe", "char-pairs", "word-pairs"]
    vocab_size: int = Field(default=0, ge=0, le=50_257)
    val_fraction: Share = 0.1
    limit_mb: Count = 0

    @property
    def is_parallel(self) -> bool:
        """Whether the text is sentences with their translations."""
        return self.tokenizer.endswith("-pairs")


class OptimTable(Table):
    """AdamW, or Muon for the matrices inside the blocks (its own rate, or 0 for `lr`) and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(gt=0)
    muon_lr: NotNegative = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: NotNegative = 0.1
    grad_clip: NotNegative = 1.0


class ScheduleTable(Table):
    """How the learning rate moves."""

    kind: Literal["cosine", "constant", "trapezoid", "noam"] = "cosine"
    warmup_steps: Count = 0
    min_lr: NotNegative = 0.0
    cooldown_fraction: float = Field(default=0.0, ge=0, le=1)


class TrainTable(Table):
    """How long, and in what portions: `batch_tokens` an optimiser step over all processes."""

    steps: Annotated[int, Field(ge=1, le=999_999)]
    batch_tokens: BatchTokens
    micro_batch: Whole
    seed: int = Field(default=42, ge=0, lt=2**32)
    loop: Literal["own", "huggingface"] = "own"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    compile: bool = False
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    init_from: str = Field(default="", pattern=INSIDE_DATA)
    spike: Literal["off", "warn", "skip", "stop"] = "warn"
    spike_z: float = Field(default=7.0, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    log_every: Whole = 10
    checkpoint_every: Whole


class EvalTable(Table):
    """How often the held-out loss is measured, and on how many tokens."""

    every: Whole
    tokens: Whole
    hellaswag_items: Count = 0


class SampleTable(Table):
    """The prompts that are continued, or translated, at every checkpoint."""

    prompts: tuple[str, ...] = Field(strict=False)
    tokens: Count
    temperature: NotNegative = 0.8
    top_k: Count = 0
    beams: Whole = 1
    length_penalty: NotNegative = 0.6


class HardwareTable(Table):
    """What the recipe is written for, and what a machine without CUDA does with it."""

    gpu: str = "1xA100"
    disk_gb: Whole
    on_cpu: Literal["as_written", "rehearsal", "refuse"]


class RehearsalTable(Table):
    """What the rehearsal replaces: its number of processes, and keys of the other tables."""

    processes: Whole = 1
    model: Overlay = Field(default_factory=dict)
    data: Overlay = Field(default_factory=dict)
    optim: Overlay = Field(default_factory=dict)
    schedule: Overlay = Field(default_factory=dict)
    train: Overlay = Field(default_factory=dict)
    eval: Overlay = Field(default_factory=dict)
    sample: Overlay = Field(default_factory=dict)


class RecipeTables(Frozen):
    """A whole recipe file."""

    about: str = Field(default="", strict=True)
    model: ModelTable
    data: DataTable
    optim: OptimTable
    schedule: ScheduleTable = ScheduleTable()
    train: TrainTable
    eval: EvalTable
    sample: SampleTable
    hardware: HardwareTable
    rehearsal: RehearsalTable = RehearsalTable()


TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "data": DataTable,
    "optim": OptimTable,
    "schedule": ScheduleTable,
    "train": TrainTable,
    "eval": EvalTable,
    "sample": SampleTable,
    "hardware": HardwareTable,
}
"""The tables that stand in recipe.json, in its order."""

REHEARSED = tuple(name for name in TABLES if name in RehearsalTable.model_fields)
"""The tables that a rehearsal may change."""
