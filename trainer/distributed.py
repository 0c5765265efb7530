"""Chooses the device of a process, a CPU or a GPU, and connects the processes of a run, under plain python or torchrun.

There are three strategies: one process, processes that each hold the whole model, and processes that each hold a part.
The training loop asks its strategy for the loss of a micro-step, the clipped gradient, and whole tensors for a
checkpoint.
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
"""How many seconds a process may keep the others waiting; after that, torch ends all of them."""
REPLICA_BYTES = 18
"""Bytes per parameter of a whole model: weights, two moments and gradient in fp32, and 16-bit weights."""
USABLE_SHARE = 0.75
"""The share of a GPU's memory that REPLICA_BYTES may take; the rest is for activations."""
_GROUPS: list[dist.ProcessGroup | None] = []
"""The process groups that were joined.

They are never freed, because gloo's destructor waits for its threads, and a thread may wait for the interpreter.
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """The device of this process; `precision` ("bf16", "fp16", "fp32") is that of matrix products. Weights are fp32."""

    torch: torch.device
    precision: str
    cuda_name: str | None

    @property
    def is_cuda(self) -> bool:
        """Return whether this is a CUDA GPU."""
        return self.torch.type == "cuda"

    @property
    def memory_bytes(self) -> int | None:
        """Return the GPU's memory; None on a CPU."""
        return torch.cuda.get_device_properties(self.torch).total_memory if self.is_cuda else None

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model runs: matrix products in 16 bits if that is the precision."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.torch.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)


def prepare_allocator() -> None:
    """Make CUDA's allocator use growing segments, which fragment less, unless the user configured the allocator.

    Call this before the first tensor on a GPU.
    """
    # The newer name, PYTORCH_ALLOC_CONF, is ignored by torch 2.9 (pytorch#183387); the older one works in all.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def precision_of_card(precision: str, card: str, has_bf16: bool) -> str:
    """Return the precision to use on a GPU: "auto" becomes bf16, or fp16 if the GPU lacks bf16 (T4, V100)."""
    if precision == "bf16" and not has_bf16:
        raise Refused(f'train.precision is "bf16", which {card} does not have; use "auto", "fp16" or "fp32"')
    return ("bf16" if has_bf16 else "fp16") if precision == "auto" else precision


def choose_device(precision: str, local_rank: int, local_count: int) -> Device:
    """Select this process's GPU, or the CPU if there is no GPU. With precision "auto", a CPU computes in fp32.

    Raise Refused if this machine has fewer GPUs than `local_count`, its number of processes.
    """
    if not torch.cuda.is_available():
        return Device(torch.device("cpu"), "fp32" if precision == "auto" else precision, None)
    if local_count > torch.cuda.device_count():
        raise Refused(f"{local_count} processes need as many GPUs, but CUDA shows {torch.cuda.device_count()}")
    card = torch.device("cuda", local_rank)
    torch.cuda.set_device(card)
    # Products that stay in fp32 may use the tensor cores' TF32, as in nanoGPT and llm.c.
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name(card)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(card, precision_of_card(precision, name, has_bf16), name)


def peak_flops(device: Device) -> float | None:
    """Return the GPU's dense 16-bit peak in flops per second; None if it is unknown or the precision is fp32."""
    peak = peak_tflops(device.cuda_name) if device.cuda_name and device.precision != "fp32" else None
    return None if peak is None else peak * 1e12


def memory_peak_bytes(device: Device) -> int | None:
    """Return the peak memory of this process: that of CUDA's allocator, or on a CPU its resident size."""
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
    """The rank of this process and the number of processes; `several` is false if no launcher started it."""

    rank: int = 0
    local_rank: int = 0
    count: int = 1
    local_count: int = 1
    several: bool = False

    @property
    def is_first(self) -> bool:
        """Return whether this process reports and saves."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> Processes:
        """Read torchrun's variables. RANK decides, because some clouds set WORLD_SIZE on a single machine."""
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
        """Return whether `here` is true in any process; all processes get the same answer."""
        return bool(self.summed(torch.tensor(float(here), device=device)).item()) if self.several else here

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's values to all, in place; the tensors must be on the process group's device."""
        for tensor in tensors if self.several else ():
            dist.broadcast(tensor, src=0)

    def from_first(self, act: Callable[[], T]) -> T:
        """Run `act` in the first process; return its result, or raise its Refused, in every process."""
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
        """Return the values of all processes by rank in the first process; an empty list in the others."""
        values: list[Any] = [None] * self.count if self.is_first else []
        if self.several:
            dist.gather_object(value, values or None)
            return values
        return [value]

    def agree(self, act: Callable[[], T]) -> T:
        """Run `act` in every process and return its own result; if it raises Refused in one, all processes raise that.

        So no process waits forever for a process that has refused.
        """
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
    """Keep the process group open: NCCL between GPUs, gloo between CPUs. After an error, the
    launcher ends the process.
    """
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
    """End this process with an exit code immediately, without any tear-down: everything that must remain is on disk.

    Unloading torch's modules takes a second of paid time, and a process of several may even hang there.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk does not change the exit code
            stream.flush()
    os._exit(code)


def fits_replicated(parameters: int, card_bytes: int) -> bool:
    """Return whether a GPU can hold the whole model with its optimiser."""
    return REPLICA_BYTES * parameters <= USABLE_SHARE * card_bytes


class ParallelStrategy:
    """How the processes of a run share a model. The defaults are for a process that holds the whole model."""

    kind: ClassVar[str | None] = None
    """The strategy's name in the `start` event."""
    is_collective = False
    """Whether every forward needs all processes. If so, none may run a step, an evaluation or a sample alone."""
    retries_a_step = False
    """Whether a process can repeat a step that ran out of memory, with smaller micro-batches."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The module that a training step calls."""
        self._parameters = list(model.parameters())

    def loss(self, inputs: Sequence[Tensor], device: Device, *, is_last: bool) -> Tensor:
        """Return a micro-batch's loss; after backward of a step's last one, the gradient is that of all processes."""
        self.before_micro_step(is_last)
        with device.autocast():
            return self.model(*(tensor.to(device.torch) for tensor in inputs))  # type: ignore[no-any-return]

    def before_micro_step(self, last: bool) -> None:
        """Prepare for the forward and backward of a micro-step; `last` is true for the last one of a step."""

    def warm_up(self, inputs: Sequence[Tensor], device: Device) -> None:
        """Prepare the strategy before the first step, with the loss of some inputs; the weights do not change."""

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to norm `limit` if it is larger; return the norm before scaling, in every process."""
        return nn.utils.clip_grad_norm_(self._parameters, limit)

    def clear(self) -> None:
        """Delete the gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as a single process would hold them; for each tensor, all processes take part."""
        yield from tensors.items()

    def split(self, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return this process's parts of whole optimiser tensors, which are named `parameter.key`."""
        return dict(tensors)


class SingleProcess(ParallelStrategy):
    """A run with one process, which shares nothing."""

    retries_a_step = True


class DataParallel(ParallelStrategy):
    """torch's DDP: each process holds everything, and gradients are averaged while backward still runs.

    DDP arranges its buckets again after its first backward, and another arrangement rounds sums differently. After a
    warm-up, a resumed run adds in the same order as a run that never stopped (docs/dev/adr/0008).
    """

    kind = "ddp"

    def __init__(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)

    def warm_up(self, inputs: Sequence[Tensor], device: Device) -> None:
        """Run one forward and backward, after which DDP arranges its buckets for the rest of the run."""
        self.loss(inputs, device, is_last=True).backward()
        self.clear()

    def before_micro_step(self, last: bool) -> None:
        """Average the gradients over the processes only in the last backward of a step."""
        self.model.require_backward_grad_sync = last  # type: ignore[assignment]


class FullyShardedParallel(ParallelStrategy):
    """Fully sharded (FSDP2): each process holds a part of every weight, gradient and moment, and fetches the rest.

    Every forward and backward is a collective, so if a process runs out of memory, the others wait for it. Therefore
    all processes end, and trainer/launch.py restarts them with smaller micro-batches.
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
        """Sum the gradients over the processes only in the last micro-step of a step."""
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def clip(self, limit: float) -> Tensor:
        """Clip each process's parts by the norm of the whole gradient, which all processes compute together."""
        return super().clip(limit).full_tensor()  # type: ignore[attr-defined,no-any-return]

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather one tensor after another from its parts, because one GPU may not be able to hold all of them whole."""
        from torch.distributed.tensor import DTensor

        for name, tensor in tensors.items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def split(self, tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return parts of the tensors that have their parameter's shape, divided like it; others stay whole."""
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
    """Return the strategy that `wanted` names; for "auto", the memory of the first process's GPU decides for all."""
    if not processes.several:
        return SingleProcess(model)
    fits = processes.from_first(lambda: card_bytes is None or fits_replicated(parameters, card_bytes))
    is_whole = wanted == "ddp" or (wanted == "auto" and fits)
    return DataParallel(model) if is_whole else FullyShardedParallel(model, processes)
