"""Parallel texts on disk, and a minimal training loop for a translation task, for any number of processes.

The processes are simulated one after the other: each reads its own micro-batches, and their gradients are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpurun.data.pairs.build import PairOrder, prepare_pairs
from gpurun.data.run_shards import write_prompts
from tests.trainer.tiny_training import recipe_record
from trainer.data import BatchPlan, micro_batch_starts, plan_batch, position_seed
from trainer.distributed import Processes
from trainer.optim import learning_rate, make_optimizer, set_learning_rate
from trainer.recipe import Recipe, parse_recipe
from trainer.shards import open_data
from trainer.translation.model import Translator
from trainer.translation.task import TranslationTask

CONTEXT = 24
PROMPTS = {"english-german": ("the old man sees a dog.",), "copy": ("abcdefgh",)}


def written(folder: Path, source: str, tokenizer: str, **more: Any) -> Path:
    """Prepare a parallel text in a folder and return the folder."""
    prompts = more.pop("prompts", PROMPTS.get(source, ()))
    order = PairOrder(source, tokenizer, more.pop("val_fraction", 0.05), folder, **more)
    made, _ = prepare_pairs(order, print)
    write_prompts(folder, made, prompts, print)
    return folder


def lab_recipe(source: str, tokenizer: str, **tables: dict[str, Any]) -> Recipe:
    """Return a recipe for a small translation model; keyword tables replace single keys."""
    record = recipe_record(
        model={"preset": "encoder-decoder", "layers": 2, "heads": 4, "width": 64, "context": CONTEXT, "dropout": 0.0},
        data={"source": source, "tokenizer": tokenizer},
        optim={"lr": 0.5, "beta2": 0.98, "eps": 1e-9, "weight_decay": 0.0, "grad_clip": 0.0},
        schedule={"kind": "noam", "warmup_steps": 200, "min_lr": 0.0},
        train={"steps": 400, "batch_tokens": 64 * CONTEXT, "micro_batch": 64, "label_smoothing": 0.1},
        eval={"tokens": 128 * CONTEXT},
        sample={"prompts": list(PROMPTS.get(source, ()))},
    )
    for name, keys in tables.items():
        record[name].update(keys)
    return parse_recipe(record)


@dataclass
class Lab:
    """A training run: its recipe, task, model and optimiser."""

    recipe: Recipe
    task: TranslationTask
    model: Translator
    optimizer: torch.optim.Optimizer

    def train(self, steps: range, processes: int = 1) -> list[float]:
        """Take these steps and return their losses."""
        plan = plan_batch(self.recipe, processes)
        self.model.train()
        return [self._step(step, plan, processes) for step in steps]

    def _step(self, step: int, plan: BatchPlan, processes: int) -> float:
        total = 0.0
        for rank in range(processes):
            starts = micro_batch_starts(range(step, step + 1), plan.sequences, plan.micro_batch, rank, processes)
            for index, start in enumerate(starts):
                inputs = self.task.train_samples.read(start, plan.micro_batch)
                torch.manual_seed(position_seed(self.recipe.train.seed, step, index * processes + rank))
                loss = self.model(*inputs) / plan.accumulation
                (loss / processes).backward()
                total += loss.item() / processes
        set_learning_rate(self.optimizer, learning_rate(self.recipe, step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def open_lab(folder: Path, recipe: Recipe) -> Lab:
    """Open a data folder for a recipe and return a lab with a fresh model."""
    data = open_data(folder, recipe.data.tokenizer, recipe.sample.prompts)
    sequences = plan_batch(recipe, 1).sequences
    task = TranslationTask.open(recipe, folder, data, sequences, Processes())
    model = task.build_model(recipe)
    return Lab(recipe, task, model, make_optimizer(model, recipe.optim))
