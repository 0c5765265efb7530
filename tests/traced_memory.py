"""The peak memory of the real trainer's step on one card, by torch's MemTracker on tensors that hold nothing.

The tensors are fake and say that they are on the CPU, for which no card is needed; what a card does otherwise is
chosen as on a card: the fused AdamW, and flash attention, which on a CPU has no dropout. Or (`on_cpu`) as they say.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpurun.planning.memory import Way
from tests.bench.recipes import measured_recipe
from trainer.data import plan_batch
from trainer.distributed import Device, FullyShardedParallel, ParallelStrategy, Processes, SingleProcess
from trainer.model import GPT
from trainer.optim import LossScale, SpikeGuard, make_optimizer
from trainer.recipe import ModelConfig
from trainer.run import Progress, Run
from trainer.train import take_step
from trainer.translation.model import Translator


def way_of(
    *,
    optim: str = "adamw",
    precision: str = "bf16",
    accumulation: int = 1,
    processes: int = 1,
    chunked: bool = True,
    shared: bool = False,
    on_cpu: bool = False,
) -> Way:
    """Return what `traced_peak_bytes` is asked in the words of the plan's formula."""
    gradient = accumulation > 1 or (processes > 1 and not shared)
    half, muon, shards = precision != "fp32", optim == "muon", processes if shared else 1
    return Way(half=half, fused=not on_cpu, chunked=chunked, muon=muon, gradient=gradient, shards=shards)


def traced_peak_bytes(
    model: dict[str, Any],
    micro_batch: int,
    *,
    optim: str = "adamw",
    precision: str = "bf16",
    accumulation: int = 1,
    processes: int = 1,
    chunked: bool = True,
    shared: bool = False,
    on_cpu: bool = False,
) -> int:
    """Return the most that one process holds in a step of a recipe with this model.

    `processes` above 1 are replicas that share gradients in buckets, or hold a part each (`shared`: FSDP2): one of them
    is traced, nothing travels.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with contextlib.ExitStack() as stack:
        if shared:
            stack.enter_context(_fake_processes(processes))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_with_nothing_in_it())
        if not on_cpu:
            stack.enter_context(_as_on_a_card())
        run = _run(model, micro_batch, optim, precision, accumulation, processes, shared=shared)
        if not chunked:
            stack.enter_context(mock.patch("trainer.model.chunked_cross_entropy", _whole_cross_entropy))
        # In the first step the optimiser's state is made, and the layouts of parts are tried on whole tensors.
        take_step(run)
        run.progress.step += 1
        tracker = MemTracker()
        tracker.track_external(run.model, run.optimizer)
        begin = run.parallel.before_micro_step
        # The tracker takes a module's second forward for an error, unless it is told that a new pass begins.
        run.parallel.before_micro_step = lambda last: (tracker.reset_mod_stats(), begin(last))  # type: ignore
        with tracker:
            take_step(run)
        peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("cpu")]["Total"])


class _Tokens:
    """Stands in for a corpus."""

    def __init__(self, config: ModelConfig) -> None:
        self._config, self.train_samples = config, self

    def read(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return inputs and targets (count, context), int64; of a parallel text source, target, labels and weight."""
        in_pairs = self._config.preset == "encoder-decoder"
        ids = [torch.zeros(count, self._config.context, dtype=torch.int64) for _ in range(2 + in_pairs)]
        return (*ids, torch.ones(())) if in_pairs else tuple(ids)


class _Buckets(ParallelStrategy):
    """Stands in for DDP, whose reducer takes no fake tensors: gradients lie in flat tensors that stay."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._flat = torch.zeros(sum(parameter.numel() for parameter in self._parameters))
        for parameter, part in zip(
            self._parameters, self._flat.split([p.numel() for p in self._parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)

    def clear(self) -> None:
        """Set the gradient to zero, where it lies."""
        self._flat.zero_()


class _Arrived:
    def wait(self) -> None:
        """Return at once."""


@contextlib.contextmanager
def _fake_processes(count: int) -> Iterator[None]:
    """Be the first of several processes between which nothing travels."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (count,))  # Made of real tensors, before there are only fake ones.
        with mock.patch("torch.distributed.device_mesh.init_device_mesh", return_value=mesh):
            yield
    finally:
        torch.distributed.destroy_process_group()


def _run(
    model: dict[str, Any],
    micro_batch: int,
    optim: str,
    precision: str,
    accumulation: int,
    count: int,
    *,
    shared: bool,
) -> Run:
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
    in_pairs = config.preset == "encoder-decoder"
    net = Translator(config, pad_id=0, label_smoothing=0.1) if in_pairs else GPT(config)
    device, processes = Device(torch.device("cpu"), precision, None), Processes(count=count, several=count > 1)
    run = object.__new__(Run)  # It is put together from files, and here are none.
    run.recipe, run.processes, run.device, run.stop_asked = recipe, processes, device, threading.Event()
    run.task, run.feed, run.plan, run.progress = _Tokens(config), None, plan_batch(recipe, count), Progress()
    run.model = net
    run.scale, run.spikes = LossScale(precision == "fp16"), SpikeGuard(7.0)
    run.parallel = SingleProcess(net)
    if count > 1:
        run.parallel = FullyShardedParallel(net, processes) if shared else _Buckets(net)
    run.optimizer = make_optimizer(net, recipe.optim, processes)
    return run


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The kernel that a card takes: flash attention or, where a mask says what may be read, the one with a bias."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    # A mask's yes and no become numbers first, of as many places as it has; every head reads the same ones.
    bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    bias = bias.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, False)[0]


def _dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    """The kernel of a card, which keeps one byte a value."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _whole_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """The loss of those who hold all logits at once."""
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), targets)


@contextlib.contextmanager
def _as_on_a_card() -> Iterator[None]:
    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", _fused),
        mock.patch("torch.nn.functional.dropout", _dropout),
    ):
        yield


@contextlib.contextmanager
def _with_nothing_in_it() -> Iterator[None]:
    """Let the step read its numbers, and send them, where there are none."""
    from torch._subclasses.fake_tensor import FakeTensor

    with (
        mock.patch.object(FakeTensor, "tolist", lambda tensor: [0.0] * tensor.numel()),
        mock.patch("torch.distributed.all_reduce", return_value=_Arrived()),
    ):
        yield
