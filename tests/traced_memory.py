"""The traced peak memory of a trainer's step (trainer/traced_memory.py), to compare with the plan's formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpurun.jobs.training.memory import Way
from tests.bench.recipes import measured_recipe
from trainer.distributed import FullyShardedParallel, ParallelStrategy, Processes, SingleProcess
from trainer.recipe import ModelConfig
from trainer.traced_memory import traced_step


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
    """Return the formula's `Way` for the same arguments of `traced_peak_bytes`."""
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
    """Return the most bytes that one process holds during a step of a recipe with this model.

    `processes` above 1 are replicas that share gradients in buckets; with `shared`, each holds a part of the weights
    (FSDP2). Only one of them is traced, and no data is sent.
    """
    config, together = ModelConfig(**model), Processes(count=processes, several=processes > 1)
    recipe = measured_recipe(
        model=model,
        optim={"lr": 1e-3, "kind": optim},
        train={
            "batch_tokens": config.context * micro_batch * accumulation * processes,
            "micro_batch": micro_batch,
            "spike": "off",
            "label_smoothing": 0.1 if config.preset == "encoder-decoder" else 0.0,
        },
    )

    def share(net: torch.nn.Module) -> ParallelStrategy:
        if processes == 1:
            return SingleProcess(net)
        return FullyShardedParallel(net, together) if shared else _Buckets(net)

    with contextlib.ExitStack() as stack:
        if shared:
            stack.enter_context(_fake_processes(processes))
        if not chunked:
            stack.enter_context(mock.patch("trainer.model.chunked_cross_entropy", _whole_cross_entropy))
        return traced_step(recipe, 0, precision, processes=together, share=share, on_card=not on_cpu)[1]


class _Buckets(ParallelStrategy):
    """A replacement for DDP, whose reducer rejects fake tensors: gradients are views of a flat tensor that stays."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._flat = torch.zeros(sum(parameter.numel() for parameter in self._parameters))
        for parameter, part in zip(
            self._parameters, self._flat.split([p.numel() for p in self._parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)

    def clear(self) -> None:
        """Set the gradients to zero in place."""
        self._flat.zero_()


@contextlib.contextmanager
def _fake_processes(count: int) -> Iterator[None]:
    """Make this process the first of `count` processes; no data is sent between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (count,))  # Needs real tensors: later there are only fake ones.
        with mock.patch("torch.distributed.device_mesh.init_device_mesh", return_value=mesh):
            yield
    finally:
        torch.distributed.destroy_process_group()


def _whole_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
    """Return the loss, computed with all logits in memory."""
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.nn.functional.cross_entropy(logits.float(), targets)
