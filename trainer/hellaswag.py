"""HellaSwag, from a file in the data folder: which of four endings does the model find likeliest, token by token?

`hellaswag.jsonl` has one item a line: {"context": [ids], "endings": [[ids], [ids], [ids], [ids]], "label": 0..3}.
An ending's score is its mean loss a token (the `acc_norm` of the published figures); chance is 0.25.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.device import Device
from trainer.distributed import Processes
from trainer.errors import Refused
from trainer.evaluate import rounds
from trainer.model import GPT

__all__ = ["FILE", "Item", "accuracy", "read_items"]

FILE = "hellaswag.jsonl"
ITEMS_AT_ONCE = 8


@dataclass(frozen=True)
class Item:
    """A context and four endings, as token ids; `label` is the right one."""

    context: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]
    label: int


def _ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not value or not all(type(i) is int and 0 <= i < vocab_size for i in value):
        raise ValueError("token ids of this vocabulary are wanted")
    return tuple(value)


def _item(line: str, vocab_size: int) -> Item:
    record = json.loads(line)
    endings = tuple(_ids(ending, vocab_size) for ending in record["endings"])
    if len(endings) != 4 or type(record["label"]) is not int or not 0 <= record["label"] < 4:
        raise ValueError("four endings and a label of 0 to 3 are wanted")
    return Item(_ids(record["context"], vocab_size), endings, record["label"])


def read_items(folder: Path, most: int, vocab_size: int) -> tuple[Item, ...]:
    """Read the first `most` items (0: none, and no file is needed); raise Refused naming the line that is wrong."""
    if not most:
        return ()
    items = []
    try:
        with (folder / FILE).open(encoding="utf-8") as lines:
            for number, line in enumerate(itertools.islice(lines, most), 1):
                try:
                    items.append(_item(line, vocab_size))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise Refused(f"line {number} of {FILE} is no item: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"eval.hellaswag_items is {most}, but {FILE} in the data folder cannot be read") from error
    if not items:
        raise Refused(f"eval.hellaswag_items is {most}, but {FILE} is empty")
    return tuple(items)


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
    logits = F.linear(model.hidden(ids)[asked], model.head_weight).float()
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
