"""Holds the parts of one training process, which trainer/start.py builds.

`Setup` never changes, `State` is the part of a checkpoint besides the tensors, and `RunIO` connects to files and
signals.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainer.compile_cache import CompileCache
from trainer.data import BatchPlan
from trainer.distributed import Device, ParallelStrategy, Processes
from trainer.evaluate import Task
from trainer.events import UNKNOWN_S, Reporter
from trainer.model import GPT
from trainer.optim import LossScale, SpikeGuard
from trainer.recipe import Recipe
from trainer.saving import CheckpointWriter

if TYPE_CHECKING:
    from trainer.translation.model import Translator

__all__ = ["RunIO", "Setup", "State", "StepResult", "TrainingRun", "machine_kind", "watch_for_stop"]

LAUNCHER_EVERY_S = 1.0
"""How many seconds pass between two checks that torchrun still runs; without it, no process would end the others."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The fixed parts of a run. Weights and moments change in place; nothing here is ever replaced."""

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
    """The GPU and the micro-batch that the recipe plans, before memory has run out."""
    compile_cache: CompileCache | None = None

    @property
    def gpt(self) -> GPT:
        """Return `model`, for a run that continues text."""
        assert isinstance(self.model, GPT)
        return self.model


@dataclass
class State:
    """The part of a checkpoint besides the tensors: the progress of the run, and how steps are divided and judged."""

    step: int = 0
    """Optimiser steps taken, including skipped ones, whose tokens are used up."""
    skipped_steps: int = 0
    """Steps in which the weights did not change: fp16 overflowed, or the recipe skips spikes."""
    loss: float | None = None
    """The loss of the last step."""
    val_loss: float | None = None
    """The validation loss after the last step; None if it was not computed there."""
    # These three depend on the recipe.
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

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore what `as_record` returned."""
        self.step, self.loss = record["step"], record["loss"]
        self.val_loss = record.get("val_loss")  # A checkpoint from before this key is evaluated again.
        self.skipped_steps = record["skipped_steps"]
        self.scale.restore(record["loss_scale"])
        self.spikes.restore(record["recent"])


@dataclass
class RunIO:
    """The outside connections: events, checkpoints, the request to stop, and the batches that are read ahead."""

    reporter: Reporter
    writer: CheckpointWriter | None
    """Only the first process has one; the others save nothing."""
    stop_requested: threading.Event
    feed: Generator[tuple[Tensor, ...], None, None] | None = None
    saved_step: int | None = None
    unreported: dict[str, float] = field(default_factory=dict)
    """The figures of the last step, until they are reported."""
    durations: list[float] = field(default_factory=list)
    """The seconds of each step since the last report."""

    def close_feed(self) -> None:
        """End the thread that reads ahead."""
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self.reporter.beat(UNKNOWN_S)
        if self.writer is not None:
            self.writer.store()


class StepResult(NamedTuple):
    """A step that was taken: loss, rate and norm, whether a process was asked to stop, and its duration."""

    figures: dict[str, float]
    stop_requested: bool
    seconds: float


class TrainingRun(NamedTuple):
    """The three parts of a run."""

    setup: Setup
    state: State
    io: RunIO


def machine_kind(device: Device) -> str:
    """Return what must be the same for bit-identical results: GPU or processor, instructions, threads, torch."""
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
    """Return a flag that SIGTERM, Ctrl-C and the death of torchrun set from now on."""
    requested = threading.Event()

    def request(*_: object) -> None:
        # Event.set holds a lock: a second signal's handler would interrupt it and wait for the lock forever.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        requested.set()

    def watch(launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_EVERY_S)
        requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # Started by torchrun, which sends no signal when it is killed.
        threading.Thread(target=watch, args=(os.getppid(),), name="launcher", daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr)  # prints all stacks if training hangs
    return requested
