"""What one training process holds. assemble.py puts it together, step.py and train.py use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.compile_cache import CompileCache
from trainer.data import Samples
from trainer.device import Device
from trainer.distributed import Processes
from trainer.events import Reporter
from trainer.items import Item
from trainer.model import GPT
from trainer.optim import BatchPlan
from trainer.parallel import Alone
from trainer.recipe import Recipe
from trainer.saving import CheckpointWriter
from trainer.scale import LossScale
from trainer.shards import TokenData
from trainer.spike import SpikeGuard
from trainer.translation.model import Translator
from trainer.translation.task import TranslationTask

__all__ = ["Progress", "Run"]


@dataclass
class Progress:
    """How far this process has come."""

    step: int = 0
    """Optimiser steps that were taken, those that were skipped among them: the tokens of these are used up."""
    skipped_steps: int = 0
    """Steps in which the weights did not move: fp16 overflowed, or the recipe skips spikes."""
    loss: float | None = None
    """The last step's."""
    val_loss: float | None = None
    """After the last step; None where it was not taken there."""
    began_monotonic_s: float | None = None
    """When this process started to train."""

    def train_s(self) -> float:
        """Return the seconds since training began in this process."""
        return 0.0 if self.began_monotonic_s is None else time.monotonic() - self.began_monotonic_s


@dataclass(kw_only=True)
class Run:
    """Everything that the loop uses. A micro-batch that turns out too large is replaced in `plan`."""

    recipe: Recipe
    processes: Processes
    device: Device
    reporter: Reporter
    stop_asked: threading.Event
    data: TokenData
    train_samples: Samples
    val_samples: Samples
    eval_windows: int
    """How many validation samples an evaluation looks at."""
    hellaswag: tuple[Item, ...]
    plan: BatchPlan
    model: GPT | Translator
    """Plain: evaluation and sampling, whose shapes vary, call this one."""
    progress: Progress
    scale: LossScale
    spikes: SpikeGuard
    parallel: Alone = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    forward: Callable[..., Tensor] = field(init=False)
    """`model`, perhaps compiled: what training calls."""
    translation: TranslationTask | None = None
    """What there is to translate; None where text is continued."""
    writer: CheckpointWriter | None = None
    """Only the first process has it."""
    saved_step: int | None = None
    compile_cache: CompileCache | None = None
    """What was compiled here; None where nothing is."""

    @property
    def gpt(self) -> GPT:
        """`model`, of a run that continues text."""
        assert isinstance(self.model, GPT)
        return self.model
