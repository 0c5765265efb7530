"""What one training process holds, and how it is put together from a recipe, a data folder and an out folder."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from trainer.config import ModelConfig, Recipe, differing_keys
from trainer.data import Samples, TokenRow
from trainer.device import Device
from trainer.distributed import Processes, replicated
from trainer.errors import Refused
from trainer.events import Reporter
from trainer.model import GPT, padded_vocab_size
from trainer.optim import BatchPlan, decayed, load_optimizer_tensors, make_optimizer, optimizer_tensors, plan_batch
from trainer.shards import TokenData, open_data

__all__ = ["Progress", "Run", "assemble"]

# The validation windows are a fixed draw from the whole split: its first ones may all be of one odd document.
VALIDATION_SEED = 0


@dataclass
class Progress:
    """How far this process has come."""

    step: int = 0
    """Optimiser steps that the weights have seen."""
    loss: float | None = None
    """The last step's."""
    began_monotonic_s: float | None = None
    """When this process started to train."""

    def train_s(self) -> float:
        """Return the seconds since training began in this process."""
        return 0.0 if self.began_monotonic_s is None else time.monotonic() - self.began_monotonic_s


@dataclass
class Run:
    """Everything that the loop in train.py uses; `forward` is `model`, perhaps compiled and perhaps in DDP."""

    recipe: Recipe
    processes: Processes
    device: Device
    reporter: Reporter
    stop_asked: threading.Event
    data: TokenData
    train_samples: Samples
    val_samples: Samples
    eval_windows: int
    plan: BatchPlan
    model: GPT
    forward: nn.Module
    optimizer: torch.optim.AdamW
    progress: Progress
    store: CheckpointStore | None
    """Only the first process has it."""
    saved_step: int | None = field(default=None)

    def snapshot(self) -> Checkpoint:
        """Return what a checkpoint of this moment holds."""
        step, tokens = self.progress.step, self.progress.step * self.recipe.train.batch_tokens
        state = {"v": 1, "step": step, "tokens": tokens, "loss": self.progress.loss, "torch": torch.__version__}
        state |= {"recipe": self.recipe.as_record(), "data": self.data.identity()}
        return Checkpoint(step, self.model.state_dict(), optimizer_tensors(self.model, self.optimizer), state)


def _build_model(config: ModelConfig, vocab_size: int, seed: int, device: Device) -> GPT:
    """Draw the weights on the CPU, so that every kind of device starts from the same ones."""
    if 0 < config.vocab_size < vocab_size:
        raise Refused(f"model.vocab_size {config.vocab_size} is less than the tokeniser's {vocab_size}")
    torch.manual_seed(seed)
    resolved = dataclasses.replace(config, vocab_size=config.vocab_size or padded_vocab_size(vocab_size))
    return GPT(resolved).to(device.torch)


def _refuse_another_run(state: Mapping[str, Any], recipe: Recipe, data: TokenData) -> None:
    """Refuse to go on from a checkpoint of another recipe or other data."""
    keys = differing_keys(state["recipe"], recipe.as_record())
    identity = data.identity()
    keys += [f"data.json: {key}" for key in identity if state["data"].get(key) != identity[key]]
    if keys:
        raise Refused(f"the checkpoint of step {state['step']} was trained with other values of {', '.join(keys)}")


def _restore(run: Run, out: Path, step: int) -> None:
    """Put the model, the optimiser and the progress back to what they were at `step`."""
    checkpoint = read_checkpoint(out, step)
    try:
        _refuse_another_run(checkpoint.state, run.recipe, run.data)
        run.model.load_state_dict(checkpoint.model)
        load_optimizer_tensors(run.model, run.optimizer, checkpoint.optimizer)
        run.progress.step, run.progress.loss = step, checkpoint.state["loss"]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(f"the checkpoint of step {step} does not fit the recipe's model: {error}") from error
    run.saved_step = step


def _resume(run: Run, out: Path) -> None:
    """Go on from the newest sound checkpoint, if there is any; the first process chooses it."""

    def choose() -> tuple[int | None, list[int]]:
        run.store = CheckpointStore(out)
        return run.store.newest_sound()

    step, damaged = run.processes.from_first(choose)
    if damaged:
        message = f"the checkpoints of steps {damaged} are damaged; going on from step {step}"
        run.reporter.warning(step or 0, "checkpoint.damaged", message)
    if step is not None:
        run.processes.agree(lambda: _restore(run, out, step))


def _wrap(run: Run) -> nn.Module:
    """Return the module that training calls; evaluation and sampling call the plain one, whose shapes may vary."""
    forward: nn.Module = run.model
    if run.recipe.train.compile:
        forward = torch.compile(forward, dynamic=False)  # type: ignore[assignment]
    return replicated(forward, run.device.torch) if run.processes.several else forward


def _warn(run: Run, out: Path) -> None:
    """Say what is not as the recipe may have hoped."""
    step, context = run.progress.step, run.recipe.model.context
    if run.device.is_cuda and run.recipe.train.precision == "auto" and run.device.precision == "fp32":
        run.reporter.warning(
            step, "precision.fp32", f"{run.device.cuda_name} has no bf16; training runs in fp32, slower"
        )
    if run.eval_windows * context < run.recipe.eval.tokens - context:
        message = f"eval.tokens is {run.recipe.eval.tokens}, but the val shards give only {run.eval_windows * context}"
        run.reporter.warning(step, "eval.fewer_tokens", message)
    # Weights and two moments in fp32; while the fourth is being written, three are kept.
    need, free = 4 * 12 * run.model.parameter_count(), shutil.disk_usage(out).free
    if run.processes.is_first and free < need:
        message = f"{free / 1e9:.1f} GB of disk are free; checkpoints may take {need / 1e9:.1f} GB"
        run.reporter.warning(step, "disk.small", message)


def _announce(run: Run) -> None:
    """Report the start of training and the derived figures."""
    recipe, plan = run.recipe, run.plan
    facts = {
        "device": run.device.torch.type,
        "cuda_name": run.device.cuda_name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": run.processes.count,
        "parameters": run.model.parameter_count(),
        "tokens_per_step": recipe.train.batch_tokens,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "precision": run.device.precision,
        "steps": recipe.train.steps,
        "resumed_from": run.saved_step,
        "train_tokens": sum(shard.tokens for shard in run.data.train),
        "val_tokens": sum(shard.tokens for shard in run.data.val),
    }
    run.reporter.start(run.progress.step, facts)
    each = f"{plan.micro_batch} x {recipe.model.context} tokens x {run.processes.count} processes x {plan.accumulation}"
    run.reporter.say(f"tokens per step: {recipe.train.batch_tokens:,} ({each} micro-steps)")
    for name, wanted in (("decayed", True), ("not decayed", False)):
        counts = [p.numel() for p in run.model.parameters() if decayed(p) is wanted]
        run.reporter.say(f"{name}: {len(counts)} tensors, {sum(counts):,} parameters")
    if run.saved_step is not None:
        run.reporter.say(f"resumed from step {run.saved_step}")


def assemble(
    recipe: Recipe,
    folders: tuple[Path, Path],
    *,
    processes: Processes,
    device: Device,
    reporter: Reporter,
    stop_asked: threading.Event,
    progress: Progress,
) -> Run:
    """Check everything, build the model, go on from a checkpoint if (data, out) has one, and announce it."""
    data_folder, out = folders
    plan = plan_batch(recipe, processes.count)
    data = open_data(data_folder, recipe.data.tokenizer, recipe.sample.prompts)

    def scan() -> None:
        for shard in (*data.train, *data.val)[processes.rank :: processes.count]:
            shard.check_ids(data.tokenizer.vocab_size)

    processes.agree(scan)
    context = recipe.model.context
    train = Samples(TokenRow(data.train, processes.local_count), context, recipe.train.seed, "train")
    val = Samples(TokenRow(data.val, processes.local_count), context, VALIDATION_SEED, "val")
    eval_windows = min(val.windows, max(1, recipe.eval.tokens // context))
    model = _build_model(recipe.model, data.tokenizer.vocab_size, recipe.train.seed, device)
    optimizer = make_optimizer(model, recipe.optim, device.torch)
    run = Run(
        recipe, processes, device, reporter, stop_asked, data, train, val, eval_windows, plan, model, model,
        optimizer, progress, None,
    )  # fmt: skip
    _resume(run, out)
    run.forward = _wrap(run)
    _announce(run)
    _warn(run, out)
    return run
