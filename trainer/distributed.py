"""What a process computes on, a CPU or a card, and with whom: the same loop runs under plain python and torchrun.

Each process holds all of the model, or a part, or there is only one: three strategies, of which the loop asks the loss
of a micro-step, the step's gradient clipped and cleared, and whole tensors for a checkpoint, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.cards import peak_tflops
from trainer.errors import Refused

if TYPE_CHECKING:
    from trainer.model import GPT
    from trainer.translation.model import Translator

__all__ = [
    "COLLECTIVE_LIMIT_S", "DataParallel", "Device", "FullyShardedParallel", "ParallelStrategy",
    "Processes", "SingleProcess", "choose_device", "fits_replicated", "joined", "leave", "memory_peak_bytes",
    "peak_flops", "precision_of_card", "prepare_allocator", "shared",
]  # fmt: skip

COLLECTIVE_LIMIT_S = 600.0
"""How long a process may let the others wait for it: then torch ends them all."""
REPLICA_BYTES = 18
"""Bytes a parameter where each process holds all: weights, two moments, gradient in fp32, and weights in 16 bits."""
USABLE_SHARE = 0.75
"""What of a card's memory they may take; the rest is for activations."""
_GROUPS: list[dist.ProcessGroup | None] = []
"""Groups that were joined: gloo's destructor waits for its threads, and one of them may wait for the interpreter."""
T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """The device of this process; `precision` is "bf16", "fp16" or "fp32", weights are fp32 in any case."""

    torch: torch.device
    precision: str
    cuda_name: str | None

    @property
    def is_cuda(self) -> bool:
        """Whether this is a CUDA card."""
        return self.torch.type == "cuda"

    @property
    def memory_bytes(self) -> int | None:
        """The card's memory; None on a CPU."""
        return torch.cuda.get_device_properties(self.torch).total_memory if self.is_cuda else None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model runs: matrix products in 16 bits, where that is the precision."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.torch.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)


def prepare_allocator() -> None:
    """Ask for segments that grow, which fragment less; before the first tensor on a card, and unless the user did."""
    # The newer name, PYTORCH_ALLOC_CONF, is ignored by torch 2.9 (pytorch#183387); the older one works in all.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def precision_of_card(wanted: str, card: str, has_bf16: bool) -> str:
    """Return what a card computes in: "auto" is bf16, and fp16 on those whose silicon lacks it (T4, V100)."""
    if wanted == "bf16" and not has_bf16:
        raise Refused(f'train.precision is "bf16", which {card} does not have; "auto", "fp16" or "fp32" would run')
    return ("bf16" if has_bf16 else "fp16") if wanted == "auto" else wanted


def choose_device(precision: str, local_rank: int, local_count: int) -> Device:
    """Take this process's card, or the CPU where there is none, which computes in fp32 unless told otherwise.

    `local_count` processes on this machine need as many cards; all of them refuse alike where there are fewer.
    """
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "fp32" if precision == "auto" else precision, None)
    if local_count > torch.cuda.device_count():
        raise Refused(f"{local_count} processes need as many cards, but CUDA shows {torch.cuda.device_count()}")
    card = torch.device("cuda", local_rank)
    torch.cuda.set_device(card)
    # What is left in fp32 may use the tensor cores' TF32, as nanoGPT and llm.c do.
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name(card)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(card, precision_of_card(precision, name, has_bf16), name)


def peak_flops(device: Device) -> float | None:
    """Return the card's dense 16-bit peak, or None where it is unknown or not what runs."""
    peak = peak_tflops(device.cuda_name) if device.cuda_name and device.precision != "fp32" else None
    return None if peak is None else peak * 1e12


def memory_peak_bytes(device: Device) -> int | None:
    """Return the most memory held at once: the allocator's on CUDA, the process's resident size elsewhere."""
    if device.is_cuda:
        return int(torch.cuda.max_memory_allocated(device.torch))
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Processes:
    """Which process this is among how many; `several` is false where no launcher started it."""

    rank: int = 0
    local_rank: int = 0
    count: int = 1
    local_count: int = 1
    several: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process reports and saves."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> Processes:
        """Read what torchrun set; RANK decides, since some clouds preset WORLD_SIZE on a lone machine."""
        if "RANK" not in os.environ:
            return cls()
        rank, local_rank, count, local_count = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
        )
        return cls(rank, local_rank, count, local_count, several=True)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all processes, in every process."""
        if self.several:
            dist.all_reduce(values)
        return values

    def any(self, here: bool, device: torch.device) -> bool:
        """Tell whether it holds in any process; the same answer in all of them."""
        return bool(self.summed(torch.tensor(float(here), device=device)).item()) if self.several else here

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give the first process's values to all, in place; they lie where the process group can send them."""
        for tensor in tensors if self.several else ():
            dist.broadcast(tensor, src=0)

    def from_first(self, act: Callable[[], T]) -> T:
        """Run `act` in the first process and return its result everywhere; a refusal is raised everywhere."""
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = act()
            except Refused as refusal:
                outcome[1] = str(refusal)
        if self.several:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise Refused(outcome[1])
        return outcome[0]  # type: ignore[no-any-return]

    def to_first(self, value: T) -> list[T]:
        """Return every process's value in the first one, by rank; nothing in the others."""
        values: list[Any] = [None] * self.count if self.is_first else []
        if self.several:
            dist.gather_object(value, values or None)
            return values
        return [value]

    def agree(self, act: Callable[[], T]) -> T:
        """Run `act` in every process and return its result; where one refuses, all do: none waits for it in vain."""
        sentence, result = None, []
        try:
            result.append(act())
        except Refused as refusal:
            sentence = str(refusal)
        sentences: list[Any] = [sentence]
        if self.several:
            sentences = [None] * self.count
            dist.all_gather_object(sentences, sentence)
        refused = next((s for s in sentences if s is not None), None)
        if refused is not None:
            raise Refused(refused)
        return result[0]


@contextlib.contextmanager
def joined(processes: Processes, device: torch.device) -> Iterator[None]:
    """Hold the process group open: NCCL between cards, gloo between CPUs. After a failure the launcher ends it."""
    if processes.several:
        on_cuda = device.type == "cuda"
        if not on_cuda and "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // processes.local_count))
        timeout = timedelta(seconds=COLLECTIVE_LIMIT_S)
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout, device_id=device if on_cuda else None)
        _GROUPS.append(dist.group.WORLD)
    yield
    if processes.several:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process with an exit code at once, without tearing anything down: all that is to stay is on the disk.

    To take torch's modules apart takes a second that is paid for, and one process of several may even hang there.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk does not change the exit code
            stream.flush()
    os._exit(code)


def fits_replicated(parameters: int, card_bytes: int) -> bool:
    """Tell whether every card can hold the whole model with its optimiser."""
    return REPLICA_BYTES * parameters <= USABLE_SHARE * card_bytes


class ParallelStrategy:
    """How the processes of a run share a model; the defaults are those of a process that holds all of it."""

    kind: ClassVar[str | None] = None
    """What the `start` event calls it."""
    is_collective = False
    """Whether every forward needs all processes: then none may leave a step, an evaluation or a sample alone."""
    retries_a_step = False
    """Whether a step whose memory ran out can be taken again here, in smaller portions."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """What a training step calls."""
        self._parameters = list(model.parameters())

    def loss(self, inputs: Sequence[Tensor], device: Device, *, is_last: bool) -> Tensor:
        """Return a micro-batch's loss; after the backward of the step's last one the gradient is that of all."""
        self.before_micro_step(is_last)
        with device.autocast():
            return self.model(*(tensor.to(device.torch) for tensor in inputs))  # type: ignore[no-any-return]

    def before_micro_step(self, last: bool) -> None:
        """Prepare for a forward and its backward, the step's last one or not."""

    def warm_up(self, inputs: Sequence[Tensor], device: Device) -> None:
        """Do what must be done before the first step, by the loss of some inputs; nothing moves."""

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to this norm, where it is larger; return the norm before, in every process."""
        return nn.utils.clip_grad_norm_(self._parameters, limit)

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


class SingleProcess(ParallelStrategy):
    """One process that shares nothing."""

    retries_a_step = True


class DataParallel(ParallelStrategy):
    """torch's DDP: each process holds all, and gradients are averaged while backward still computes earlier ones.

    DDP lays its buckets out again after its first backward, and another layout rounds sums differently. After a warm-up
    a resumed run adds in the order of one that never stopped (docs/dev/adr/0008).
    """

    kind = "ddp"

    def __init__(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)

    def warm_up(self, inputs: Sequence[Tensor], device: Device) -> None:
        """Let DDP lay out its buckets as they stay, which it does after its first backward."""
        self.loss(inputs, device, is_last=True).backward()
        self.clear()

    def before_micro_step(self, last: bool) -> None:
        """Let the gradients travel in the last backward of a step, and only there."""
        self.model.require_backward_grad_sync = last  # type: ignore[assignment]


class FullyShardedParallel(ParallelStrategy):
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

    def before_micro_step(self, last: bool) -> None:
        """Let backward sum the gradients over the processes in the last micro-step of a step, and only there."""
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def clip(self, limit: float) -> Tensor:
        """Scale the parts by the norm of the whole, which they come to together."""
        return super().clip(limit).full_tensor()  # type: ignore[attr-defined,no-any-return]

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


def shared(
    model: GPT | Translator, processes: Processes, *, wanted: str, parameters: int, card_bytes: int | None
) -> ParallelStrategy:
    """Let the processes share a model in the way that is wanted; under "auto" the first one's card decides for all."""
    if not processes.several:
        return SingleProcess(model)
    fits = processes.from_first(lambda: card_bytes is None or fits_replicated(parameters, card_bytes))
    is_whole = wanted == "ddp" or (wanted == "auto" and fits)
    return DataParallel(model) if is_whole else FullyShardedParallel(model, processes)
