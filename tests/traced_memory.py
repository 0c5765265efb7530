"""The peak memory of the real trainer's step on one card, by torch's MemTracker on tensors that hold nothing.

The tensors are fake and say that they are on the CPU, for which no card is needed; what a card does otherwise is
chosen as on a card: the fused AdamW, and flash attention, which on a CPU has no dropout.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.bench.recipes import measured_recipe
from trainer.config import ModelConfig
from trainer.device import Device
from trainer.distributed import Processes
from trainer.model import GPT
from trainer.optim import make_optimizer, plan_batch
from trainer.parallel import Alone, Replicas
from trainer.run import Progress, Run
from trainer.scale import LossScale
from trainer.spike import SpikeGuard
from trainer.step import Stepper

STEPS = 2
"""The optimiser's state is made in the first; the second has all of it from its start."""


def traced_peak_bytes(
    model: dict[str, Any],
    micro_batch: int,
    *,
    optim: str = "adamw",
    precision: str = "bf16",
    accumulation: int = 1,
    processes: int = 1,
    chunked: bool = True,
) -> int:
    """Return the most that one process holds in two steps of a recipe with this model.

    `processes` above 1 are replicas that share gradients in buckets: one of them is traced, nothing travels.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(), _as_on_a_card(), contextlib.ExitStack() as stack:
        run = _run(model, micro_batch, optim, precision, accumulation, processes)
        if not chunked:
            stack.enter_context(mock.patch("trainer.model.chunked_cross_entropy", _whole_cross_entropy))
        tracker = MemTracker()
        tracker.track_external(run.model, run.optimizer)
        stepper = Stepper(run)
        begin = run.parallel.before_micro_step
        # The tracker takes a module's second forward for an error, unless it is told that a new pass begins.
        run.parallel.before_micro_step = lambda last: (tracker.reset_mod_stats(), begin(last))  # type: ignore
        with tracker:
            for _ in range(STEPS):
                stepper.take()
                run.progress.step += 1
        peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("cpu")]["Total"])


class _Tokens:
    """Stands in for a corpus."""

    def __init__(self, context: int) -> None:
        self._context = context

    def read(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return inputs and targets (count, context), int64."""
        return tuple(torch.zeros(count, self._context, dtype=torch.int64) for _ in range(2))


class _Arrived:
    def wait(self) -> None:
        """Return at once."""


def _run(model: dict[str, Any], micro_batch: int, optim: str, precision: str, accumulation: int, count: int) -> Run:
    config = ModelConfig(**model)
    recipe = measured_recipe(
        model=model,
        optim={"lr": 1e-3, "kind": optim},
        train={
            "batch_tokens": config.context * micro_batch * accumulation * count,
            "micro_batch": micro_batch,
            "spike": "off",
        },
    )
    gpt = GPT(config)
    absent: Any = None
    device, processes = Device(torch.device("cpu"), precision, None), Processes(count=count, several=count > 1)
    run = Run(
        recipe=recipe, processes=processes, device=device, reporter=absent, stop_asked=threading.Event(), data=absent,
        train_samples=_Tokens(config.context), val_samples=absent, eval_windows=0, hellaswag=(),
        plan=plan_batch(recipe, count), model=gpt, progress=Progress(), scale=LossScale(precision == "fp16"),
        spikes=SpikeGuard(7.0),
    )  # fmt: skip
    run.parallel = Replicas(gpt, run.processes) if count > 1 else Alone(gpt)
    run.optimizer = make_optimizer(gpt, recipe.optim)
    run.forward = gpt
    return run


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float) -> Tensor:
    """The kernel that a card with bf16 or fp16 takes."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False)
    return found[0]


def _dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    """The kernel of a card, which keeps one byte a value."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _whole_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """The loss of those who hold all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), targets)


@contextlib.contextmanager
def _as_on_a_card() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensor

    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", _flash),
        mock.patch("torch.nn.functional.dropout", _dropout),
        mock.patch.object(FakeTensor, "tolist", lambda tensor: [0.0] * tensor.numel()),
        mock.patch("torch.distributed.all_reduce", return_value=_Arrived()),
    ):
        yield
