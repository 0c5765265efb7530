"""recipe.json as a frozen dataclass of tables (tables.py), checked at the door."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from trainer import combinations
from trainer.errors import Refused
from trainer.strict import check as _check
from trainer.strict import read_table
from trainer.tables import (
    DataConfig,
    EvalConfig,
    HardwareConfig,
    ModelConfig,
    OptimConfig,
    RehearsalConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
)

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
    "as_planned",
    "completed",
    "differing_keys",
    "load_recipe",
    "parse_recipe",
]


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
        combinations.check_recipe(self)

    def as_record(self) -> dict[str, Any]:
        """The recipe as recipe.json holds it."""
        record = asdict(self)
        record["sample"]["prompts"] = list(self.sample.prompts)
        return record


def parse_recipe(record: Any) -> Recipe:
    """Return the recipe that a decoded recipe.json holds; raise Refused naming the first key that is wrong."""
    recipe: Recipe = read_table(Recipe, record, "")
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


def as_planned(recipe: Recipe, most: int | None, parallel: str | None) -> Recipe:
    """Return the recipe with at most `most` sequences at once, and shared in that way where it leaves that open.

    The steps and their tokens stay.
    """
    train = recipe.train
    if most is not None and most < 1:
        raise Refused(f"--micro-batch {most} is less than one sequence")
    if most is not None and most < train.micro_batch:
        train = replace(train, micro_batch=most)
    if parallel is not None and train.parallel == "auto":
        train = replace(train, parallel=parallel)
    return replace(recipe, train=train)


def completed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's recipe with the keys that have come since: their defaults are what was trained before."""
    whole = dict(record)
    for name, kind in get_type_hints(Recipe).items():
        if is_dataclass(kind):
            defaults = {key.name: key.default for key in fields(kind) if key.default is not MISSING}
            whole[name] = {**defaults, **whole.get(name, {})}
    return whole


_MAY_CHANGE = {
    *("train.micro_batch", "train.compile", "train.parallel", "train.log_every", "train.checkpoint_every"),
    *("train.spike", "train.spike_z"),
    *("eval.every", "eval.hellaswag_items"),
}


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which two recipe records would train differently, sorted.

    How often something is logged, saved or sampled, how the batch is cut, and what hardware was asked for may differ;
    so may what follows at a spike, or a run that stopped at one would stop there whenever it goes on.
    """
    different, old = [], completed(old)
    for table in ("model", "data", "optim", "schedule", "train", "eval"):
        before, after = old[table], new.get(table, {})
        for key in sorted({*before, *after}):
            if f"{table}.{key}" not in _MAY_CHANGE and before.get(key) != after.get(key):
                different.append(f"{table}.{key}")
    return different
