"""What one training process holds, put together from a recipe, a data folder and an out folder, and announced.

`Setup` is what never changes, `State` what a checkpoint has beside the tensors, `RunIO` what leads outside. A recipe,
data or checkpoint that does not fit is refused here.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint import CheckpointStore
from trainer.compile_cache import CompileCache, cache_name
from trainer.data import BatchPlan, plan_batch
from trainer.distributed import Device, ParallelStrategy, Processes, shared
from trainer.evaluate import Task, TextTask
from trainer.events import UNKNOWN_S, Reporter
from trainer.loss import chunked_cross_entropy
from trainer.model import GPT
from trainer.optim import LossScale, SpikeGuard, make_optimizer
from trainer.out_of_memory import end_with_the_others, read_room, restore_micro_batch
from trainer.recipe import Recipe, parameters_of
from trainer.saving import CheckpointWriter, restore_model, restore_optimizer
from trainer.shards import open_data

if TYPE_CHECKING:
    from trainer.translation.model import Translator

__all__ = ["Run", "RunIO", "Setup", "State", "StepResult", "machine_kind", "open_run", "source_map", "watch_for_stop"]

LAUNCHER_EVERY_S = 1.0
"""How often a process looks whether torchrun is still there: without it nobody would wait for the end, nor know it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run is made of. Weights and moments move in place; nothing here is ever replaced."""

    recipe: Recipe
    data: Path
    out: Path
    processes: Processes
    device: Device
    task: Task
    model: GPT | Translator
    parallel: ParallelStrategy
    optimizer: torch.optim.Optimizer
    planned: Mapping[str, Any]
    """Which card is to take which micro-batch by the recipe, before memory has run out."""
    compile_cache: CompileCache | None = None

    @property
    def gpt(self) -> GPT:
        """`model`, of a run that continues text."""
        assert isinstance(self.model, GPT)
        return self.model


@dataclass
class State:
    """What a checkpoint has beside the tensors: how far the run has come, and how steps are cut and judged."""

    step: int = 0
    """Optimiser steps that were taken, those that were skipped among them: the tokens of these are used up."""
    skipped_steps: int = 0
    """Steps in which the weights did not move: fp16 overflowed, or the recipe skips spikes."""
    loss: float | None = None
    """The last step's."""
    val_loss: float | None = None
    """After the last step; None where it was not taken there."""
    # These three come with the recipe.
    plan: BatchPlan = field(init=False)
    scale: LossScale = field(init=False)
    spikes: SpikeGuard = field(init=False)

    def as_record(self, setup: Setup) -> dict[str, Any]:
        """Return the JSON part of a checkpoint."""
        return {
            "v": 1, "step": self.step, "tokens": self.step * setup.recipe.train.batch_tokens,
            "torch": torch.__version__, "threads": torch.get_num_threads(), "kind": machine_kind(setup.device),
            "processes": setup.processes.count, "loss": self.loss, "val_loss": self.val_loss,
            "skipped_steps": self.skipped_steps, "room": {**setup.planned, "fits": self.plan.micro_batch},
            "loss_scale": self.scale.as_record(), "recent": self.spikes.as_record(),
            "recipe": setup.recipe.as_record(), "data": setup.task.data.identity(),
        }  # fmt: skip

    def restore(self, setup: Setup, record: Mapping[str, Any]) -> None:
        """Take over what `as_record` said."""
        self.step, self.loss = record["step"], record["loss"]
        self.val_loss = record.get("val_loss")  # One from before this was noted is judged again.
        self.skipped_steps = record["skipped_steps"]
        self.scale.restore(record["loss_scale"])
        self.spikes.restore(record["recent"])
        restore_micro_batch(setup, self, record.get("room", {}))


@dataclass
class RunIO:
    """What leads outside: events, checkpoints, the request to stop, and the batches that are read ahead."""

    reporter: Reporter
    writer: CheckpointWriter | None
    """The first process's; the others save nothing."""
    stop_requested: threading.Event
    feed: Generator[tuple[Tensor, ...], None, None] | None = None
    saved_step: int | None = None
    unreported: dict[str, float] = field(default_factory=dict)
    """The figures of the last step, until they are reported,"""
    durations: list[float] = field(default_factory=list)
    """and the seconds of the steps since the last that was."""

    def close_feed(self) -> None:
        """End the thread that reads ahead."""
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self.reporter.beat(UNKNOWN_S)
        if self.writer is not None:
            self.writer.store()


class StepResult(NamedTuple):
    """A step that was taken: loss, rate and norm, whether a process was told to stop, and how long it took."""

    figures: dict[str, float]
    stop_requested: bool
    seconds: float


class Run(NamedTuple):
    """The three parts of a run."""

    setup: Setup
    state: State
    io: RunIO


def open_run(
    recipe: Recipe, data: Path, out: Path, *, processes: Processes, device: Device, reporter: Reporter,
    stop_requested: threading.Event | None = None, state: State | None = None,
) -> Run:  # fmt: skip
    """Check everything, build the model, restore a checkpoint if `out` or `data` has one, and report the start."""
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
    if recipe.train.compile:  # Named for the planned micro-batch, also where a smaller one is run.
        assert isinstance(model, GPT)
        shared_by, mode = (parallel.kind, processes.count), recipe.train.compile_mode
        compile_cache = CompileCache(
            cache_name(model.config, device, state.plan.micro_batch, *shared_by, mode), processes
        )
        model.compile_blocks(mode)
        # What this run has brought to the disk already is newer than what came along.
        is_loaded = compile_cache.load((out, data))
    setup = Setup(
        recipe=recipe, data=data, out=out, processes=processes, device=device, task=task, model=model,
        parallel=parallel, optimizer=optimizer, compile_cache=compile_cache,
        planned={"card": device.cuda_name, "planned": state.plan.micro_batch},
    )  # fmt: skip
    io = RunIO(reporter, writer, stop_requested or threading.Event())
    if restored is not None:
        restore_optimizer(
            restored, model, optimizer, parallel=parallel, processes=processes, device=device.torch,
            restore_state=lambda record: state.restore(setup, record),
        )  # fmt: skip
        io.saved_step = state.step
    if processes.several:
        restore_micro_batch(setup, state, processes.from_first(lambda: read_room(out)))
        end_with_the_others(out, lambda: writer is not None and writer.is_writing)
    _announce(setup, state, io, is_loaded)
    return Run(setup, state, io)


def _open_task(recipe: Recipe, folder: Path, sequences: int, processes: Processes) -> Task:
    """Open the data folder, of which every machine has a copy; its processes share the reading of the shards."""
    data = open_data(folder, recipe.data.tokenizer, recipe.sample.prompts)
    for shard in (*data.train, *data.val)[processes.local_rank :: processes.local_count]:
        shard.check_ids(data.tokenizer.vocab_size)
    if recipe.model.preset == "encoder-decoder":
        from trainer.translation.task import TranslationTask

        return TranslationTask.open(recipe, folder, data, sequences, processes)
    if recipe.eval.core:  # What would be missed after the last step is missed now.
        from trainer.core_score import demand_tasks

        demand_tasks(folder)
    return TextTask.open(recipe, folder, data, processes)


def _announce(setup: Setup, state: State, io: RunIO, is_loaded: bool | None) -> None:
    """Report what will run, and what of it is not as the recipe may have hoped."""
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
    if recipe.train.loop != "huggingface":  # whose blocks and loss are another library's
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
    """Yield the code and the sentence of what is not as the recipe may have hoped."""
    recipe, task, device = setup.recipe, setup.task, setup.device
    if device.is_cuda and recipe.train.precision == "auto" and device.precision == "fp16":
        message = f"{device.cuda_name} has no bf16; training runs in fp16, whose overflows cost a step each"
        yield "precision.fp16", message
    if recipe.train.parallel == "fsdp" and not setup.processes.several:
        message = 'train.parallel is "fsdp", but one process has nobody to share with: it holds the whole model'
        yield "parallel.alone", message
    tokens = task.eval_windows * recipe.model.context
    if tokens < recipe.eval.tokens - recipe.model.context:
        yield "eval.fewer_tokens", f"eval.tokens is {recipe.eval.tokens}, but the val shards give only {tokens}"
    if len(task.items) < (expected := recipe.eval.hellaswag_items):
        yield "eval.fewer_items", f"eval.hellaswag_items is {expected}, but the file has only {len(task.items)}"
    # Weights and two moments in fp32; while the fourth is being written, three are kept.
    need = 4 * 12 * parameters_of(setup.model.config)
    if setup.processes.is_first and (free := shutil.disk_usage(setup.out).free) < need:
        yield "disk.small", f"{free / 1e9:.1f} GB of disk are free; checkpoints may take {need / 1e9:.1f} GB"


def source_map(landmarks: Mapping[str, Callable[..., Any]]) -> str:
    """Return file and line of embedding, attention, loss, checkpoint and generation, for those who read it."""
    landmarks = {"loss": chunked_cross_entropy, "checkpoint": CheckpointStore.save, **landmarks}
    codes = {name: inspect.unwrap(function).__code__ for name, function in landmarks.items()}
    root = f"{Path(__file__).parents[1]}/"
    return " | ".join(
        f"{name} {codes[name].co_filename.removeprefix(root)}:{codes[name].co_firstlineno}"
        for name in ("embedding", "attention", "loss", "checkpoint", "generation")
    )


def machine_kind(device: Device) -> str:
    """Return what must be the same for the same bits to come out: card or processor, instructions, threads, torch."""
    if device.is_cuda:
        return f"{device.cuda_name} | torch {torch.__version__}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    with_what = torch.backends.cpu.get_cpu_capability()
    return f"{model or platform.machine()} {with_what} | {torch.get_num_threads()} threads | torch {torch.__version__}"


def watch_for_stop() -> threading.Event:
    """Return the flag that SIGTERM, Ctrl-C and the death of torchrun set from now on."""
    requested = threading.Event()

    def request(*_: object) -> None:
        # Event.set holds a lock: a second signal's handler would come in between and wait for it for ever.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        requested.set()

    def watch(launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_EVERY_S)
        requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Started by torchrun, which tells nobody when it is killed.
        threading.Thread(target=watch, args=(os.getppid(),), name="launcher", daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)  # every thread's stack, if found stuck
    return requested
