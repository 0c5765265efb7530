"""The validation loss over a fixed part of the held-out text; all processes share the work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data import Samples
from trainer.device import Device
from trainer.distributed import Processes
from trainer.model import GPT
from trainer.translation.model import Translator

__all__ = ["Evaluation", "rounds", "token_bytes", "validation"]


@dataclass(frozen=True)
class Evaluation:
    """What a validation found: the mean loss in nats a token, and bits a byte of the text (None: it has no bytes)."""

    val_loss: float
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        """The loss as the number of tokens among which the model is as unsure as it is."""
        return math.exp(min(self.val_loss, 700.0))


def token_bytes(tokens: tuple[bytes, ...], eot_id: int | None) -> np.ndarray:
    """Return how many bytes of text each token id stands for; the end-of-text token stands for none."""
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    if eot_id is not None:
        lengths[eot_id] = 0
    return lengths


def rounds(items: int, each: int, processes: Processes) -> list[tuple[int, int]]:
    """Return this process's (first, count) of every round; all have as many rounds, for a forward may be a collective.

    Where the items run out, `count` is 0 and `first` is some item all the same.
    """
    starts = range(processes.rank * each, items + processes.count * each, processes.count * each)
    number = -(-items // (processes.count * each))
    return [(min(first, items - 1), max(0, min(each, items - first))) for first in list(starts)[:number]]


@torch.no_grad()
def validation(
    model: GPT | Translator,
    samples: Samples,
    windows: int,
    micro_batch: int,
    *,
    lengths: np.ndarray | None,
    device: Device,
    processes: Processes,
    stopping: Callable[[], bool],
) -> Evaluation | None:
    """Evaluate the first `windows` samples; None, everywhere, if any process must stop.

    `lengths` are those of `token_bytes`; None where bits a byte are not asked for. All processes take part: one that
    evaluated alone would keep the others waiting past the collective's time-out.
    """
    # [sum of losses, windows, bytes]
    totals = torch.zeros(3, dtype=torch.float64, device=device.torch)
    model.eval()
    for first, count in rounds(windows, micro_batch, processes):
        if processes.any(stopping(), device.torch):
            model.train()
            return None
        inputs = samples.read(first, max(1, count))
        with device.autocast():
            loss = model(*(tensor.to(device.torch) for tensor in inputs))
        totals[0] += loss.double() * count
        totals[1] += count
        if lengths is not None and count:
            totals[2] += int(lengths[inputs[1].numpy()].sum())
    model.train()
    loss_sum, seen, size = processes.summed(totals).tolist()
    tokens = windows * model.config.context
    return Evaluation(loss_sum / seen, loss_sum / seen * tokens / size / math.log(2) if size else None)
