"""What this process computes on: CPU or CUDA, in which precision, how much memory it took, how fast it could be."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass

import torch

from trainer.cards import peak_tflops
from trainer.errors import Refused

__all__ = ["Device", "choose_device", "memory_peak_bytes", "peak_flops", "precision_of_card", "prepare_allocator"]


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
