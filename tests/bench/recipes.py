"""Recipes for measurements: keys not given have their defaults, nothing is sampled, and any machine will do."""

from __future__ import annotations

from typing import Any

from trainer.recipe import (
    DataConfig,
    EvalConfig,
    HardwareConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
)

NEVER = 999_999
"""More steps than any measurement takes."""


def measured_recipe(
    *,
    model: dict[str, Any],
    optim: dict[str, Any],
    train: dict[str, Any],
    schedule: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
) -> Recipe:
    """Return the recipe with these keys; without `evaluation` it never evaluates, without `schedule` the rate is
    fixed."""
    return Recipe(
        about="a measurement",
        model=ModelConfig(**model),
        data=DataConfig(source="random", tokenizer="char-pairs" if "encoder-decoder" in model.values() else "char"),
        optim=OptimConfig(**optim),
        schedule=ScheduleConfig(**schedule or {"kind": "constant"}),
        train=TrainConfig(**{"steps": NEVER, "checkpoint_every": NEVER} | train),
        eval=EvalConfig(**evaluation or {"every": NEVER, "tokens": 1}),
        sample=SampleConfig(prompts=(), tokens=0),
        hardware=HardwareConfig(disk_gb=1, on_cpu="as_written"),
    )
