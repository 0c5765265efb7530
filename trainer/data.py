"""Determines which tokens every step reads: a pure function of the seed and the step, for any number of processes.

The shards of a split form one long row of tokens, which is cut into windows. Sample i of the run is window p[i %
windows]. Here p is a permutation that is drawn again for every epoch i // windows, or the identity if the recipe's
order is "in_order". There is no other state, so a resumed run only continues to count.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.errors import Refused
from trainer.recipe import Order, Recipe
from trainer.shards import Shard, spare_memory_bytes, windows_in

__all__ = [
    "VALIDATION_SEED",
    "BatchPlan",
    "Samples",
    "TokenRow",
    "micro_batch_starts",
    "plan_batch",
    "position_seed",
    "read_batches",
    "smaller",
]

VALIDATION_SEED = 0
"""The seed of permuted validation samples, a fixed draw: a split may begin with one unusual document."""


@dataclass(frozen=True)
class BatchPlan:
    """How the sequences of one optimiser step are divided: sequences = micro_batch x processes x accumulation."""

    sequences: int
    micro_batch: int
    accumulation: int


def plan_batch(recipe: Recipe, processes: int) -> BatchPlan:
    """Return the plan with the largest micro-batch that the recipe allows; Refused if no plan has equal shares."""
    tokens, context, most = recipe.train.batch_tokens, recipe.model.context, recipe.train.micro_batch
    if tokens % context:
        raise Refused(f"train.batch_tokens {tokens} is not a multiple of model.context {context}")
    sequences = tokens // context
    if sequences % processes:
        raise Refused(f"a step of {sequences} sequences cannot be shared equally by {processes} processes")
    each = sequences // processes
    micro_batch = next(size for size in range(min(most, each), 0, -1) if each % size == 0)
    return BatchPlan(sequences, micro_batch, each // micro_batch)


def smaller(plan: BatchPlan) -> BatchPlan | None:
    """Return the plan with the next smaller micro-batch that divides a process's share; None if there is none."""
    each = plan.micro_batch * plan.accumulation
    size = next((size for size in range(plan.micro_batch - 1, 0, -1) if each % size == 0), None)
    return None if size is None else BatchPlan(plan.sequences, size, each // size)


class TokenRow:
    """The shards of a split, end to end; in memory if they need at most half of this process's share of memory."""

    def __init__(self, shards: Sequence[Shard], processes_here: int = 1) -> None:
        self.tokens = sum(shard.tokens for shard in shards)
        preload = 2 * self.tokens <= spare_memory_bytes() // 2 // processes_here
        self._parts = [shard.loaded() if preload else shard.mapped() for shard in shards]
        self._starts = np.cumsum([0] + [shard.tokens for shard in shards])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from position `start` as int64, across the ends of shards."""
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        out = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            begin = start + filled - int(self._starts[index])
            piece = self._parts[index][begin : begin + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1
        return out


class Samples:
    """The windows of a split in their own order, or in an order that is drawn from the seed for every epoch."""

    def __init__(self, row: TokenRow, context: int, seed: int, name: str, order: Order = "permuted") -> None:
        self._row, self._context, self._seed = row, context, seed
        self._is_permuted = order == "permuted"
        self.windows = windows_in(row.tokens, context, name)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.windows)
        if not self._is_permuted:
            return place
        if epoch != self._epoch:
            # RandomState, not Generator: numpy promises that its stream never changes.
            state = np.random.RandomState((self._seed + epoch) % 2**32)
            self._epoch, self._order = epoch, state.permutation(self.windows)
        return int(self._order[place])

    def read(self, first: int, count: int) -> tuple[Tensor, ...]:
        """Return inputs and targets (count, context), int64, of samples first … first + count - 1."""
        context = self._context
        rows = np.stack([self._row.read(self._window(i) * context, context + 1) for i in range(first, first + count)])
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def position_seed(seed: int, step: int, micro: int) -> int:
    """Return the seed of a micro-batch's dropout masks; `micro` is its number in the step, over all processes."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def micro_batch_starts(steps: range, sequences: int, micro_batch: int, rank: int, processes: int) -> Iterator[int]:
    """Yield the first sample of each micro-batch of one process; processes take a step's micro-batches in turn."""
    for step in steps:
        for start in range(rank * micro_batch, sequences, processes * micro_batch):
            yield step * sequences + start


def read_batches(
    read: Callable[[int], tuple[Tensor, ...]], starts: Iterable[int], device: torch.device
) -> Generator[tuple[Tensor, ...], None, None]:
    """Yield read(start) for every start, on the device; on CUDA a thread reads two ahead into pinned memory."""
    if device.type != "cuda":
        yield from map(read, starts)
        return

    def pinned(start: int) -> tuple[Tensor, ...]:
        return tuple(tensor.pin_memory() for tensor in read(start))

    # Pinning uses the thread's current GPU, which would otherwise be GPU 0 in every process.
    for inputs in ahead(pinned, starts, lambda: torch.cuda.set_device(device)):
        yield tuple(tensor.to(device, non_blocking=True) for tensor in inputs)


def ahead(
    make: Callable[[int], tuple[Tensor, ...]], starts: Iterable[int], begin: Callable[[], None], depth: int = 2
) -> Iterator[tuple[Tensor, ...]]:
    """Yield make(start) for every start; a thread works up to `depth` ahead, and its exception is raised here."""
    made: queue.Queue[tuple[Tensor, ...] | BaseException | None] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: tuple[Tensor, ...] | BaseException | None) -> None:
        while not closed.is_set():
            try:
                made.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            begin()
            for start in starts:
                put(make(start))
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001  passed to the loop, which raises it
            put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
