"""Reports what is about to run, with every derived figure, and what is not as the recipe may have hoped."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import torch

from trainer.optim import decayed
from trainer.places import places
from trainer.recipe import parameters_of
from trainer.run import Run

__all__ = ["announce"]


def announce(run: Run, out: Path, *, compile_cache: str | None) -> None:
    """Report the start of training; `compile_cache` is "loaded", "none" or None where nothing is compiled."""
    recipe, plan, count = run.recipe, run.plan, run.processes.count
    facts = {
        "device": run.device.torch.type,
        "cuda_name": run.device.cuda_name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": count,
        "parameters": parameters_of(run.model.config),
        "tokens_per_step": recipe.train.batch_tokens,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "precision": run.device.precision,
        "steps": recipe.train.steps,
        "resumed_from": run.saved_step,
        "train_tokens": sum(shard.tokens for shard in run.data.train),
        "val_tokens": sum(shard.tokens for shard in run.data.val),
        "parallel": run.parallel.kind,
        "compile_cache": compile_cache,
    }
    run.reporter.start(run.progress.step, facts)
    if recipe.train.loop != "huggingface":  # whose blocks and loss are another library's
        run.reporter.say(f"code: {places(run.model)}")
    each = f"{plan.micro_batch} x {recipe.model.context} tokens x {count} processes x {plan.accumulation} micro-steps"
    run.reporter.say(f"tokens per step: {recipe.train.batch_tokens:,} ({each})")
    for name, wanted in (("decayed", True), ("not decayed", False)):
        counts = [p.numel() for p in run.model.parameters() if decayed(p) is wanted]
        run.reporter.say(f"{name}: {len(counts)} tensors, {sum(counts):,} parameters")
    if run.saved_step is not None:
        run.reporter.say(f"resumed from step {run.saved_step}")
    _warn(run, out)


def _warn(run: Run, out: Path) -> None:
    """Say what is not as the recipe may have hoped."""
    step, context = run.progress.step, run.recipe.model.context
    if run.device.is_cuda and run.recipe.train.precision == "auto" and run.device.precision == "fp16":
        message = f"{run.device.cuda_name} has no bf16; training runs in fp16, whose overflows cost a step each"
        run.reporter.warning(step, "precision.fp16", message)
    if run.recipe.train.parallel == "fsdp" and not run.processes.several:
        message = 'train.parallel is "fsdp", but one process has nobody to share with: it holds the whole model'
        run.reporter.warning(step, "parallel.alone", message)
    if run.eval_windows * context < run.recipe.eval.tokens - context:
        message = f"eval.tokens is {run.recipe.eval.tokens}, but the val shards give only {run.eval_windows * context}"
        run.reporter.warning(step, "eval.fewer_tokens", message)
    wanted = run.recipe.eval.hellaswag_items
    if len(run.hellaswag) < wanted:
        message = f"eval.hellaswag_items is {wanted}, but the file has only {len(run.hellaswag)}"
        run.reporter.warning(step, "eval.fewer_items", message)
    # Weights and two moments in fp32; while the fourth is being written, three are kept.
    need = 4 * 12 * parameters_of(run.model.config)
    free = shutil.disk_usage(out).free if run.processes.is_first else need
    if free < need:
        message = f"{free / 1e9:.1f} GB of disk are free; checkpoints may take {need / 1e9:.1f} GB"
        run.reporter.warning(step, "disk.small", message)
