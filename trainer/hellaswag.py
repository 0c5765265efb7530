"""HellaSwag: which of four endings does the model find likeliest, token by token?

An ending's score is its mean loss a token (the `acc_norm` of the published figures); chance is 0.25.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.device import Device
from trainer.distributed import Processes
from trainer.evaluate import rounds
from trainer.items import Item
from trainer.model import GPT

__all__ = ["accuracy"]

ITEMS_AT_ONCE = 8


def _rows(items: Sequence[Item], context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (4 items, time): every ending after its context, -100 where nothing is asked.

    What is longer than the model's context loses its beginning, what is shorter is padded at its end, unseen.
    """
    pairs = [(item.context, ending) for item in items for ending in item.endings]
    rows = [((*before, *ending)[-(context + 1) :], min(len(ending), context)) for before, ending in pairs]
    width = max(len(row) for row, _ in rows) - 1
    ids, targets = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    for index, (row, asked) in enumerate(rows):
        tokens = torch.tensor(row)
        ids[index, : len(row) - 1] = tokens[:-1]
        targets[index, len(row) - 1 - asked : len(row) - 1] = tokens[-asked:]
    return ids, targets


def _mean_losses(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss (rows) of each row's targets; only the rows asked for go through the head."""
    asked = targets != -100
    logits = F.linear(model.hidden(ids)[asked], model.head_weight)[:, : model.vocab_size].float()
    losses = torch.zeros_like(targets, dtype=torch.float32)
    losses[asked] = F.cross_entropy(logits, targets[asked], reduction="none")
    return losses.sum(dim=1) / asked.sum(dim=1)


@torch.no_grad()
def accuracy(
    model: GPT, items: Sequence[Item], *, device: Device, processes: Processes, stopping: Callable[[], bool]
) -> float | None:
    """Return the share of items whose right ending has the least mean loss; None, everywhere, if any must stop."""
    right = torch.zeros((), dtype=torch.float64, device=device.torch)
    model.eval()
    for first, count in rounds(len(items), ITEMS_AT_ONCE, processes):
        if processes.any(stopping(), device.torch):
            model.train()
            return None
        some = items[first : first + max(1, count)]
        ids, targets = _rows(some, model.config.context)
        with device.autocast():
            losses = _mean_losses(model, ids.to(device.torch), targets.to(device.torch))
        labels = torch.tensor([item.label for item in some], device=device.torch)
        right += (losses.view(-1, 4).argmin(dim=1) == labels)[:count].sum()
    model.train()
    return float(processes.summed(right).item()) / len(items)
