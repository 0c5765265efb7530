"""How much memory one GPU holds at most, counted tensor by tensor, and which micro-batch that leaves.

What is counted is what the trainer's step keeps; torch's MemTracker on the real step agrees (tests/traced_memory.py).
N tokens of C channels in L layers with H heads, V the vocabulary, P parameters. All of it grows with each of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf, isqrt

from gpurun.core.model import Offer
from gpurun.planning.recipe import ResolvedRecipe, padded_vocab, parameters_of
from gpurun.planning.tables import ModelTable

GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 2  # CUDA, cuBLAS and NCCL, measured as 1 to 2 GiB.
FRAGMENTATION = 1.05
USABLE_SHARE = 0.92
CHUNK_BYTES = 2**28  # The trainer's own loss holds so much of fp32 logits at once.
REPLICA_BYTES, REPLICA_SHARE = 18, 0.75
"""The trainer's own switch (trainer/parallel.py): where so many bytes a parameter are above this share of a card."""


@dataclass(frozen=True)
class _Kept:
    """Bytes a token that a forward keeps for its backward, in 16-bit autocast or in fp32, with flash attention.

    `channel` is for each layer and channel, `masks` more of it where there is dropout, `head` for each layer and head.
    `around` is for each channel and no layer: at the top of the network when the loss is taken, and `backward` where
    instead the first layer's backward is at work.
    """

    channel: float
    masks: float
    head: float
    around: float
    backward: float


# For a faithful layer: the stream twice in fp32 (8), the two norms' results (4), queries, keys and values (6),
# attention's result (2), the wide layer before and after GELU (16). A modern one keeps queries and keys in fp32 besides
# (8), and its attention's result twice. The encoder-decoder's are traced, with its dropout and on attention's path
# that keeps the weights.
_KEPT = {
    ("faithful", True): _Kept(36, 2, 4, 12, 18),
    ("faithful", False): _Kept(64, 2, 4, 12, 28),
    ("modern", True): _Kept(46, 2, 12, 16, 28),
    ("modern", False): _Kept(76, 2, 12, 16, 44),
    ("encoder-decoder", True): _Kept(187, 0, 0, 12, 18),
    ("encoder-decoder", False): _Kept(374, 0, 0, 12, 28),
}
_TOKEN_BYTES = 40  # Ids, targets, and the loss of each.
_NORM_BYTES = 16  # A layer's means and spreads of a token.


@dataclass(frozen=True)
class Way:
    """How a model is trained, as far as memory knows: what `way_of` reads from a recipe and an offer.

    `half` computes in 16 bits; `chunked` is the trainer's own loss; `muon` moves the matrices in the blocks with one
    moment; `gradient` is there already when a forward begins (a step in portions, or replicas); of `shards` processes
    each holds its part.
    """

    half: bool = True
    chunked: bool = True
    muon: bool = False
    gradient: bool = False
    shards: int = 1


def peak_bytes(model: ModelTable, micro_batch: int, vocab_size: int = 0, way: Way = Way()) -> int:
    """The most memory one GPU holds at once, everything included: tensors, the allocator's gaps, CUDA itself."""
    return int(tensor_bytes(model, micro_batch, vocab_size, way) * FRAGMENTATION) + CONTEXT_BYTES


def tensor_bytes(model: ModelTable, micro_batch: int, vocab_size: int = 0, way: Way = Way()) -> int:
    """The most that tensors take at once, by the highest of four moments of a step.

    While the loss is taken, all that was kept is there, with logits and the head's gradient; then the last layer's
    backward; at the end of backward there is the whole gradient, and a tied embedding's three times; then the optimiser
    moves. Of `shards` processes under FSDP2 each holds its part of weights, gradients and moments, all 16-bit copies,
    in fp32 two blocks and what belongs to no block, and the whole gradient where a step is taken in portions: that
    follows from the trainer's code (trainer/parallel.py) and has not been traced.
    """
    tokens, vocab = micro_batch * model.context, padded_vocab(model, vocab_size)
    kept, width = _KEPT[model.preset, way.half], model.width
    head = vocab * width
    before, whole = _weight_bytes(model, vocab_size, way)
    a_layer = (kept.channel + (kept.masks if model.dropout else 0)) * width + kept.head * model.heads + _NORM_BYTES
    forward = before + tokens * (model.layers * a_layer + _TOKEN_BYTES + (width if model.dropout else 0))
    at_loss = forward + tokens * kept.around * width + _loss_bytes(model, tokens, vocab, way)
    # Where a gradient is there already, that of a layer's widest matrix (4 C x C) stands beside it until it is added.
    added = 16 * width * width if way.gradient else 0
    at_backward = forward + max(tokens * kept.backward * width + 4 * head, added)
    at_end = whole + ((12 if way.gradient else 8) * head if model.tied else 0)
    muon = 36 * width * width if way.muon else 0  # Its orthogonal update of the largest matrix.
    return int(max(at_loss, at_backward, at_end, whole + muon))


def _loss_bytes(model: ModelTable, tokens: int, vocab: int, way: Way) -> int:
    """What the loss takes for itself: logits and their gradient, and of the head its gradient and its copies."""
    head, width = vocab * model.width, model.width
    if not way.chunked:
        # Log-softmax in fp32 4, its gradient 4 and in 16 bits 2, 16-bit logits 2 (in fp32 12 too); or, of few tokens,
        # what is left of them when the head's own gradient is made.
        return max(12 * tokens * vocab + 2 * head, 6 * tokens * vocab + (8 if model.tied else 6) * head)
    chunk = min(tokens, 1 << max(0, (CHUNK_BYTES // (4 * vocab)).bit_length() - 1))
    return chunk * (vocab * (6 if way.half else 4) + 4 * width) + 8 * head


def _weight_bytes(model: ModelTable, vocab_size: int, way: Way) -> tuple[int, int]:
    """What weights, gradients and moments take while a forward runs, and at the end of a backward."""
    parameters, root = parameters_of(model, vocab_size), _root_parameters(model, vocab_size)
    matrices = parameters - root
    block = matrices // model.layers
    state = 12 * parameters - (4 * matrices if way.muon else 0)
    copies = 2 * matrices if way.half else 0
    if way.shards == 1:
        return state + copies + (4 * parameters if way.gradient else 0), state + 4 * parameters
    fetched = 4 * (root + 2 * block) + (4 * parameters if way.gradient else 0)
    state = -(-state // way.shards)
    return state + copies + 2 * root + fetched, state + 4 * parameters // way.shards + 8 * root + fetched


@cache
def _root_parameters(model: ModelTable, vocab_size: int) -> int:
    """The parameters that belong to no block: what a model has for each layer more, taken off for all of them."""
    parameters = parameters_of(model, vocab_size)
    block = parameters_of(model.model_copy(update={"layers": model.layers + 1}), vocab_size) - parameters
    return parameters - model.layers * block


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
    train = recipe.tables.train
    half, muon = bool(offer.gpu_count) and train.precision != "fp32", recipe.tables.optim.kind == "muon"
    return Way(half=half, chunked=train.loop == "own", muon=muon, gradient=gradient, shards=shards)


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
