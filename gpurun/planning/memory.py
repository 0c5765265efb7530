"""How much memory one GPU holds at most, and which micro-batch that leaves."""

from __future__ import annotations

from math import inf, isqrt

from gpurun.core.model import Offer
from gpurun.planning.recipe import ResolvedRecipe, parameters_of
from gpurun.planning.tables import ModelTable
from gpurun.planning.tensors import ALONE, Way, tensor_bytes

GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 2  # CUDA, cuBLAS and NCCL, measured as 1 to 2 GiB.
FRAGMENTATION = 1.05
USABLE_SHARE = 0.92
REPLICA_BYTES, REPLICA_SHARE = 18, 0.75
"""The trainer's own switch (trainer/parallel.py): where so many bytes a parameter are above this share of a card."""


def peak_bytes(model: ModelTable, micro_batch: int, vocab_size: int = 0, way: Way = ALONE) -> int:
    """The most memory one GPU holds at once, everything included: tensors, the allocator's gaps, CUDA itself."""
    return int(tensor_bytes(model, micro_batch, vocab_size, way) * FRAGMENTATION) + CONTEXT_BYTES


def shards_of(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """Among how many processes the trainer shares the weights: all under FSDP, else 1.

    Where the recipe leaves it open, all share what the trainer by itself would share, and what else would not fit.
    """
    wanted, model = recipe.tables.train.parallel, recipe.tables.model
    if processes == 1 or not offer.gpu_count or wanted == "ddp":
        return 1
    if wanted == "fsdp" or REPLICA_BYTES * parameters_of(model, vocab_size) > REPLICA_SHARE * offer.vram_gb * GIB:
        return processes
    replica = peak_bytes(model, 1, vocab_size, _way(recipe, offer, gradient=True, shards=1))
    return 1 if replica <= usable_bytes(offer, processes) else processes


def way_of(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> Way:
    """How an offer's machine trains a recipe with a micro-batch."""
    shards = shards_of(recipe, offer, processes, vocab_size)
    in_portions = recipe.tables.train.batch_tokens > recipe.tables.model.context * processes * micro_batch
    return _way(recipe, offer, gradient=in_portions or (processes > 1 and shards == 1), shards=shards)


def _way(recipe: ResolvedRecipe, offer: Offer, *, gradient: bool, shards: int) -> Way:
    train, on_card = recipe.tables.train, bool(offer.gpu_count)
    half = train.precision != "fp32" if on_card else train.precision in ("bf16", "fp16")
    muon, chunked = recipe.tables.optim.kind == "muon", train.loop == "own"
    return Way(half=half, fused=on_card, chunked=chunked, muon=muon, gradient=gradient, shards=shards)


def peak_on(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> int:
    """The most memory that a GPU of an offer holds with a micro-batch of this recipe."""
    way = way_of(recipe, offer, processes, micro_batch, vocab_size)
    return peak_bytes(recipe.tables.model, micro_batch, vocab_size, way)


def fitting_micro_batch(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """The largest micro-batch that fits, is no larger than the recipe's and divides its batch; 0 when there is none."""
    train = recipe.tables.train
    sequences, left = divmod(train.batch_tokens, recipe.tables.model.context * processes)
    if left:
        return 0
    usable = usable_bytes(offer, processes)
    for size in reversed(divisors(sequences)):
        if size <= train.micro_batch and peak_on(recipe, offer, processes, size, vocab_size) <= usable:
            return size
    return 0


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def memory_gib(offer: Offer, processes: int = 1) -> float:
    """What each process has: a card's memory, or its share of a machine without one; infinite where it is not known."""
    return offer.vram_gb if offer.gpu_count else offer.memory_gb / processes or inf


def usable_bytes(offer: Offer, processes: int = 1) -> float:
    """What of it a plan counts with."""
    return memory_gib(offer, processes) * GIB * USABLE_SHARE
