"""Builds a run from a recipe, a data folder and an out folder, and announces it.

A recipe, data or checkpoint that does not fit is refused here.
"""

from __future__ import annotations

import inspect
import platform
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import CheckpointStore
from trainer.compile_cache import CompileCache, cache_name
from trainer.data import plan_batch
from trainer.distributed import Device, Processes, shared
from trainer.evaluate import Task, TextTask
from trainer.events import Reporter
from trainer.loss import chunked_cross_entropy
from trainer.model import GPT
from trainer.optim import LossScale, SpikeGuard, make_optimizer
from trainer.out_of_memory import end_with_the_others, read_room, restore_micro_batch
from trainer.recipe import Recipe, parameters_of
from trainer.run import RunIO, Setup, State, TrainingRun
from trainer.saving import restore_model, restore_optimizer
from trainer.shards import open_data

__all__ = ["open_run", "source_map"]


def open_run(
    recipe: Recipe, data: Path, out: Path, *, processes: Processes, device: Device, reporter: Reporter,
    stop_requested: threading.Event | None = None, state: State | None = None,
) -> TrainingRun:  # fmt: skip
    """Check everything, build the model, restore a checkpoint from `out` or `data`, and report the start."""
    state = state or State()
    state.plan = plan_batch(recipe, processes.count)
    state.scale, state.spikes = LossScale(device.precision == "fp16"), SpikeGuard(recipe.train.spike_z)
    task = processes.agree(lambda: _open_task(recipe, data, state.plan.sequences, processes))
    model = task.build_model(recipe)
    model.to(device.torch)
    writer, restored = restore_model(model, recipe, task.data, data, out, processes, reporter)
    if recipe.train.init_from and restored is None:
        from trainer.pretrained import load_weights

        assert isinstance(model, GPT)
        weights, sha256, gpt = data / recipe.train.init_from, task.data.tokenizer.sha256, model
        processes.agree(lambda: load_weights(gpt, weights, tokenizer_sha256=sha256))
    parallel = shared(
        model, processes, wanted=recipe.train.parallel,
        parameters=parameters_of(model.config), card_bytes=device.memory_bytes,
    )  # fmt: skip
    optimizer = make_optimizer(model, recipe.optim, processes)
    compile_cache, is_loaded = None, None
    if recipe.train.compile:  # Named after the planned micro-batch, even if a smaller one runs.
        assert isinstance(model, GPT)
        shared_by, mode = (parallel.kind, processes.count), recipe.train.compile_mode
        compile_cache = CompileCache(
            cache_name(model.config, device, state.plan.micro_batch, *shared_by, mode), processes
        )
        model.compile_blocks(mode)
        # A cache that this run has already written is newer than the one that was sent along.
        is_loaded = compile_cache.load((out, data))
    setup = Setup(
        recipe=recipe, data=data, out=out, processes=processes, device=device, task=task, model=model,
        parallel=parallel, optimizer=optimizer, compile_cache=compile_cache,
        planned={"card": device.cuda_name, "planned": state.plan.micro_batch},
    )  # fmt: skip
    io = RunIO(reporter, writer, stop_requested or threading.Event())

    def restore_state(record: Mapping[str, Any]) -> None:
        state.restore(record)
        restore_micro_batch(setup, state, record.get("room", {}))

    if restored is not None:
        restore_optimizer(
            restored, model, optimizer, parallel=parallel, processes=processes, device=device.torch,
            restore_state=restore_state,
        )  # fmt: skip
        io.saved_step = state.step
    if processes.several:
        restore_micro_batch(setup, state, processes.from_first(lambda: read_room(out)))
        end_with_the_others(out, lambda: writer is not None and writer.is_writing)
    _announce(setup, state, io, is_loaded)
    return TrainingRun(setup, state, io)


def _open_task(recipe: Recipe, folder: Path, sequences: int, processes: Processes) -> Task:
    """Open the data folder, of which each machine has a copy; a machine's processes divide the check of shards."""
    data = open_data(folder, recipe.data.tokenizer, recipe.sample.prompts)
    for shard in (*data.train, *data.val)[processes.local_rank :: processes.local_count]:
        shard.check_ids(data.tokenizer.vocab_size)
    if recipe.model.preset == "encoder-decoder":
        from trainer.translation.task import TranslationTask

        return TranslationTask.open(recipe, folder, data, sequences, processes)
    if recipe.eval.core:  # Missing files must be noticed now, not after the last step.
        from trainer.core_score import demand_tasks

        demand_tasks(folder)
    return TextTask.open(recipe, folder, data, processes)


def _announce(setup: Setup, state: State, io: RunIO, is_loaded: bool | None) -> None:
    """Report what will run, and where it falls short of the recipe."""
    recipe, plan, data, count = setup.recipe, state.plan, setup.task.data, setup.processes.count
    facts = {
        "device": setup.device.torch.type,
        "cuda_name": setup.device.cuda_name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": count,
        "parameters": parameters_of(setup.model.config),
        "tokens_per_step": recipe.train.batch_tokens,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "precision": setup.device.precision,
        "steps": recipe.train.steps,
        "resumed_from": io.saved_step,
        "train_tokens": sum(shard.tokens for shard in data.train),
        "val_tokens": sum(shard.tokens for shard in data.val),
        "parallel": setup.parallel.kind,
        "compile_cache": {True: "loaded", False: "none", None: None}[is_loaded],
    }
    say = io.reporter.say
    io.reporter.start(state.step, facts)
    if recipe.train.loop != "huggingface":  # Its blocks and loss are another library's.
        say(f"code: {source_map(setup.task.landmarks(setup.model))}")
    each = f"{plan.micro_batch} x {recipe.model.context} tokens x {count} processes"
    say(f"tokens per step: {recipe.train.batch_tokens:,} ({each} x {plan.accumulation} micro-steps)")
    groups = setup.optimizer.param_groups
    for name, is_decayed in (("decayed", True), ("not decayed", False)):
        counts = [p.numel() for group in groups if bool(group["weight_decay"]) is is_decayed for p in group["params"]]
        say(f"{name}: {len(counts)} tensors, {sum(counts):,} parameters")
    if io.saved_step is not None:
        say(f"resumed from step {io.saved_step}")
    for code, message in _shortcomings(setup):
        io.reporter.warning(state.step, code, message)


def _shortcomings(setup: Setup) -> Iterator[tuple[str, str]]:
    """Yield the code and the sentence of each way in which the run falls short of the recipe."""
    recipe, task, device = setup.recipe, setup.task, setup.device
    if device.is_cuda and recipe.train.precision == "auto" and device.precision == "fp16":
        message = f"{device.cuda_name} has no bf16; training uses fp16, where each overflow costs a step"
        yield "precision.fp16", message
    if recipe.train.parallel == "fsdp" and not setup.processes.several:
        message = 'train.parallel is "fsdp", but there is only one process: it holds the whole model'
        yield "parallel.alone", message
    tokens = task.eval_windows * recipe.model.context
    if tokens < recipe.eval.tokens - recipe.model.context:
        yield "eval.fewer_tokens", f"eval.tokens is {recipe.eval.tokens}, but the val shards give only {tokens}"
    if len(task.items) < (expected := recipe.eval.hellaswag_items):
        yield "eval.fewer_items", f"eval.hellaswag_items is {expected}, but the file has only {len(task.items)}"
    # Weights and two moments in fp32; while the fourth checkpoint is written, three are kept.
    need = 4 * 12 * parameters_of(setup.model.config)
    if setup.processes.is_first and (free := shutil.disk_usage(setup.out).free) < need:
        yield "disk.small", f"{free / 1e9:.1f} GB of disk are free; checkpoints may take {need / 1e9:.1f} GB"


def source_map(landmarks: Mapping[str, Callable[..., Any]]) -> str:
    """Return file and line of embedding, attention, loss, checkpoint and generation, for readers of the code."""
    landmarks = {"loss": chunked_cross_entropy, "checkpoint": CheckpointStore.save, **landmarks}
    codes = {name: inspect.unwrap(function).__code__ for name, function in landmarks.items()}
    root = f"{Path(__file__).parents[1]}/"
    return " | ".join(
        f"{name} {codes[name].co_filename.removeprefix(root)}:{codes[name].co_firstlineno}"
        for name in ("embedding", "attention", "loss", "checkpoint", "generation")
    )
