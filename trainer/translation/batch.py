"""Sentence pairs as tensors, and the two attention masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Batch", "SpecialTokens", "collate", "source_mask", "target_mask"]


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of padding, start and end, which have no text."""

    pad_id: int
    start_id: int
    end_id: int


def source_mask(source: Tensor, pad_id: int) -> Tensor:
    """Return (batch, 1, 1, source) bool, true for each real token, to which positions may attend."""
    return (source != pad_id)[:, None, None, :]


def target_mask(target: Tensor, pad_id: int) -> Tensor:
    """Return (batch, 1, target, target) bool: each position may attend to itself and to real tokens before it."""
    time = target.shape[1]
    past = torch.ones(time, time, dtype=torch.bool, device=target.device).tril()
    return (target != pad_id)[:, None, None, :] & past


@dataclass(frozen=True)
class Batch:
    """The tensors for teacher forcing: the decoder reads `target` and must predict `labels`, one place ahead of it."""

    source: Tensor
    """(batch, source) int64: start, the source's tokens, end, padding."""
    target: Tensor
    """(batch, target) int64: start, the target's tokens, padding."""
    labels: Tensor
    """(batch, target) int64: the target's tokens, end, padding."""
    pad_id: int

    @property
    def source_mask(self) -> Tensor:
        """Return the mask of the source."""
        return source_mask(self.source, self.pad_id)

    @property
    def target_mask(self) -> Tensor:
        """Return the mask of the target."""
        return target_mask(self.target, self.pad_id)

    @property
    def tokens(self) -> int:
        """Return the number of real labels, by which a loss is divided."""
        return int((self.labels != self.pad_id).sum())


def _padded(rows: Sequence[np.ndarray], pad_id: int, multiple: int) -> Tensor:
    """Return the rows as one int64 tensor, as wide as the longest, rounded up to a multiple."""
    width = -(-max(len(row) for row in rows) // multiple) * multiple
    out = np.full((len(rows), width), pad_id, dtype=np.int64)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(out)


def collate(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], special: SpecialTokens, multiple: int = 1
) -> Batch:
    """Return the batch of some pairs, each given without padding: a source as start … end, a target as … end.

    Widths are multiples of `multiple`, so that a compiled model meets few shapes.
    """
    shifted = [np.concatenate(([special.start_id], target[:-1])) for target in targets]
    pad_id = special.pad_id
    source, target, labels = (_padded(rows, pad_id, multiple) for rows in (sources, shifted, targets))
    return Batch(source, target, labels, pad_id)
