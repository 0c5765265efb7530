"""The validation loss: the same tokens every time, shared out over all processes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.data import Samples
from trainer.device import Device
from trainer.distributed import Processes
from trainer.model import GPT

__all__ = ["validation_loss"]


@torch.no_grad()
def validation_loss(
    model: GPT,
    samples: Samples,
    windows: int,
    micro_batch: int,
    *,
    device: Device,
    processes: Processes,
    stopping: Callable[[], bool],
) -> float | None:
    """Return the mean loss (nats a token) over the first `windows` samples; None, everywhere, if any process must stop.

    All processes take part: one that evaluated alone would keep the others waiting past the collective's time-out.
    """
    # [sum of losses, windows, processes that were told to stop]
    totals = torch.zeros(3, dtype=torch.float64, device=device.torch)
    model.eval()
    for first in range(processes.rank * micro_batch, windows, processes.count * micro_batch):
        if stopping():
            totals[2] = 1
            break
        count = min(micro_batch, windows - first)
        ids, targets = samples.read(first, count)
        with device.autocast():
            loss = model(ids.to(device.torch), targets.to(device.torch))
        totals[0] += loss.double() * count
        totals[1] += count
    model.train()
    loss_sum, seen, stopped = processes.summed(totals).tolist()
    return None if stopped else loss_sum / seen
