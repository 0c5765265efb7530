"""Reads the shards of a parallel text, and chooses the pairs of every step.

In the shards a pair is: start, source, end, target, end. There is no index; one pass over the tokens finds the
positions of the pairs, and verifies them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data import Samples, TokenRow
from trainer.errors import Refused
from trainer.shards import Shard
from trainer.translation.batch import Batch, SpecialTokens, collate

__all__ = ["PairRow", "PairSamples", "read_special_tokens"]

PAD_MULTIPLE = 8
"""A batch's width is rounded up to a multiple of this, which suits tensor cores and gives few shapes."""


def read_special_tokens(folder: Path, vocab_size: int) -> SpecialTokens:
    """Return the special ids that data.json (readable JSON) lists under "pairs"; refuse text without pairs."""
    record = json.loads((folder / "data.json").read_text(encoding="utf-8")).get("pairs")
    names = ("pad_id", "start_id", "end_id")
    if not isinstance(record, dict):
        raise Refused('data.json has no "pairs": these shards hold text, not a parallel text')
    ids: list[Any] = [record.get(name) for name in names]
    sound = all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not sound or len(set(ids)) != len(ids):
        raise Refused(f'"pairs" in data.json must give {", ".join(names)}: three different ids of the vocabulary')
    return SpecialTokens(*ids)


def _positions(shards: Sequence[Shard], token: int) -> np.ndarray:
    """Return the positions of a token in a row of shards."""
    found, before = [], 0
    for shard in shards:
        found.append(np.flatnonzero(shard.mapped() == token) + before)
        before += shard.tokens
    return np.concatenate(found)


class PairRow:
    """The pairs of a split, read from its shards."""

    def __init__(
        self, shards: Sequence[Shard], special: SpecialTokens, context: int, name: str, processes_here: int = 1
    ) -> None:
        self._row = TokenRow(shards, processes_here)
        self.special = special
        self._starts, ends = _positions(shards, special.start_id), _positions(shards, special.end_id)
        following = np.append(self._starts[1:], self._row.tokens)
        sound = len(ends) == 2 * len(self._starts) and len(ends) > 0 and self._starts[0] == 0
        if sound:
            self._middles, self._ends = ends[0::2], ends[1::2]
            sound = bool(np.all((self._starts < self._middles) & (self._ends + 1 == following)))
        if not sound or len(_positions(shards, special.pad_id)):
            raise Refused(f"the {name} shards are not pairs of the form start, source, end, target, end")
        self.source_lengths = self._middles - self._starts + 1
        self.target_lengths = self._ends - self._middles
        """The number of real labels of each pair: the target's tokens and its end."""
        for side, lengths in (("source", self.source_lengths), ("target", self.target_lengths)):
            longest = int(lengths.argmax())
            if lengths[longest] > context:
                raise Refused(
                    f"the {side} of pair {longest} of the {name} shards needs {lengths[longest]} positions, "
                    f"more than model.context {context}"
                )

    def __len__(self) -> int:
        return len(self._starts)

    def source(self, pair: int) -> np.ndarray:
        """Return start, the source's tokens, end."""
        return self._row.read(int(self._starts[pair]), int(self.source_lengths[pair]))

    def target(self, pair: int) -> np.ndarray:
        """Return the target's tokens, end."""
        return self._row.read(int(self._middles[pair]) + 1, int(self.target_lengths[pair]))

    def batch(self, pairs: Sequence[int], multiple: int = 1) -> Batch:
        """Return the batch of some pairs."""
        sources, targets = [self.source(pair) for pair in pairs], [self.target(pair) for pair in pairs]
        return collate(sources, targets, self.special, multiple)


class PairSamples(Samples):
    """The pairs of a split in an order that the seed decides: sample i of the run is pair p[i % pairs], as in Samples.

    The `sequences` samples of a step are sorted by length before they are divided into micro-batches, which reduces
    padding. A step has the same pairs, in the same order, for any micro-batch and any number of processes.
    """

    def __init__(self, row: PairRow, sequences: int, seed: int) -> None:
        # Not Samples' own constructor: its windows are cut from a row of tokens.
        self._pairs, self._sequences, self._seed = row, sequences, seed
        self.windows = len(row)
        self._is_permuted = True
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)
        self._step, self._of_step = -1, np.empty(0, dtype=np.int64)

    def pair(self, sample: int) -> int:
        """Return the pair of a sample of the run."""
        return self._window(sample)

    def step_pairs(self, step: int) -> np.ndarray:
        """Return the pairs of one step, from the shortest to the longest."""
        if step != self._step:
            first = step * self._sequences
            drawn = np.array([self.pair(sample) for sample in range(first, first + self._sequences)])
            lengths = self._pairs.target_lengths[drawn], self._pairs.source_lengths[drawn]
            self._step, self._of_step = step, drawn[np.lexsort((*lengths, sum(lengths)))]
        return self._of_step

    def step_tokens(self, step: int) -> int:
        """Return the number of real labels in a step over all processes, which each computes without communication."""
        return int(self._pairs.target_lengths[self.step_pairs(step)].sum())

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return source, target, labels and weight of samples first … first + count - 1, which belong to one step.

        The weight is their number of real labels, divided by the average number for `count` samples of the step.
        """
        step, offset = divmod(first, self._sequences)
        pairs = self.step_pairs(step)[offset : offset + count]
        batch = self._pairs.batch(pairs.tolist(), PAD_MULTIPLE)
        tokens = int(self._pairs.target_lengths[pairs].sum())
        weight = torch.tensor(tokens * self._sequences / (count * self.step_tokens(step)), dtype=torch.float32)
        return batch.source, batch.target, batch.labels, weight
