"""How several processes train one model: each holds all of it, or a part, or there is only one process.

The loop asks four things of either way: get ready for a micro-step, finish the gradient of a step, clear it, and give
whole tensors for a checkpoint, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed import Processes
from trainer.model import GPT
from trainer.translation.model import Translator

__all__ = ["Alone", "Replicas", "Shards", "fits_replicated"]

BUCKET_BYTES = 25 * 1024 * 1024
"""How much of the gradient travels at once: torch's own DDP sends as much."""
REPLICA_BYTES = 18
"""Bytes a parameter where each process holds all: weights, two moments, gradient in fp32, and weights in 16 bits."""
USABLE_SHARE = 0.75
"""What of a card's memory they may take; the rest is for activations."""


def fits_replicated(parameters: int, card_bytes: int) -> bool:
    """Tell whether every card can hold the whole model with its optimiser."""
    return REPLICA_BYTES * parameters <= USABLE_SHARE * card_bytes


class Alone:
    """One process: nothing is shared."""

    kind: ClassVar[str | None] = None
    """What the `start` event calls it."""
    is_collective = False
    """Whether every forward needs all processes: then none may leave a step, an evaluation or a sample alone."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def before_micro_step(self, last: bool) -> None:
        """Say that a forward and its backward come next; `last` is the one after which the step's gradient is whole."""

    def finish(self) -> None:
        """Return when the gradient of the step is whole; every process calls it once a step, whatever went wrong."""

    def clear(self) -> None:
        """Drop the gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as one process alone would hold them; all processes take part in each."""
        yield from tensors.items()

    def split(self, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return this process's part of whole optimiser tensors, named `parameter.key`."""
        return dict(tensors)


class Replicas(Alone):
    """Data parallel: each process holds all, and gradients are averaged while backward still computes earlier ones.

    They live in flat buckets, filled from the last layer to the first. A bucket travels when it is full, in the order
    of the buckets: so a process in which a micro-step failed can still send what the others wait for, and then all
    learn of it and take the step again. (torch's DDP cannot be used again after a backward that did not end.)
    """

    kind = "ddp"

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        super().__init__(model)
        self._count = processes.count
        self._buckets: list[Tensor] = []
        self._missing: list[int] = []
        self._sizes: list[int] = []
        self._sent: list[dist.Work] = []
        self._sending = False
        group: list[nn.Parameter] = []
        for parameter in reversed(self._parameters):
            group.append(parameter)
            if sum(p.numel() * p.element_size() for p in group) >= BUCKET_BYTES:
                self._add_bucket(group)
                group = []
        if group:
            self._add_bucket(group)

    def _add_bucket(self, group: list[nn.Parameter]) -> None:
        """Lay the gradients of some parameters into one flat tensor."""
        first, number = group[0], len(self._buckets)
        flat = torch.zeros(sum(p.numel() for p in group), dtype=first.dtype, device=first.device)
        for parameter, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
            parameter.grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _: self._ready(number))
        self._buckets.append(flat)
        self._sizes.append(len(group))

    def _ready(self, number: int) -> None:
        """Count a gradient that is complete, and send the buckets that are."""
        if self._sending:
            self._missing[number] -= 1
            while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
                self._send()

    def _send(self) -> None:
        work = dist.all_reduce(self._buckets[len(self._sent)], async_op=True)
        assert work is not None
        self._sent.append(work)

    def before_micro_step(self, last: bool) -> None:
        """Let the gradients travel in the last backward of a step, and only there."""
        self._sending, self._missing = last, list(self._sizes)

    def finish(self) -> None:
        """Send what has not been sent, wait for all of it, and divide the sums."""
        self._sending = False
        while len(self._sent) < len(self._buckets):
            self._send()
        for work, flat in zip(self._sent, self._buckets, strict=True):
            work.wait()
            flat /= self._count
        self._sent.clear()

    def clear(self) -> None:
        """Set the gradient to zero, where it lies."""
        for flat in self._buckets:
            flat.zero_()


class Shards(Alone):
    """Fully sharded (FSDP2): each process holds a part of every weight, gradient and moment, and fetches the rest.

    Every forward and backward is a collective, so that a process which runs out of memory leaves the others waiting:
    all end, and trainer/launch.py begins again in smaller portions.
    """

    kind = "fsdp"
    is_collective = True

    def __init__(self, model: GPT | Translator, processes: Processes) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        kind = next(model.parameters()).device.type
        mesh = init_device_mesh(kind, (processes.count,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name in model.collective_methods:
            register_fsdp_forward_method(model, name)
        super().__init__(model)
        self._model = model

    def before_micro_step(self, last: bool) -> None:
        """Let backward sum the gradients over the processes in the last micro-step of a step, and only there."""
        self._model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather one tensor after the other from its parts: a card that needs parts cannot hold the whole of all."""
        from torch.distributed.tensor import DTensor

        for name, tensor in tensors.items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def split(self, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Give every tensor that has the shape of its parameter the parameter's layout."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        parameters = dict(model.named_parameters())
        parts: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            like = parameters.get(name.rpartition(".")[0])
            if isinstance(like, DTensor) and like.shape == tensor.shape:
                tensor = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
            parts[name] = tensor
        return parts
