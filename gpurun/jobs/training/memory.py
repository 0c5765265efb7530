"""How much memory one GPU holds at most, which micro-batch that leaves, and what would have to be smaller to fit.

What is counted, at the moments of a training step, is what the trainer's step keeps; torch's MemTracker on the real
step agrees (trainer/traced_memory.py).
N tokens of C channels in L layers with H heads, V the vocabulary, P parameters. All of it grows with each of these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isqrt
from typing import Any

from gpurun.core.records import Offer
from gpurun.jobs.training.recipe import ModelConfig, ResolvedRecipe, padded_vocab, parameters_of

CHUNK_BYTES = 2**28  # The trainer's own loss holds so much of fp32 logits at once,
CARD_BYTES = 2**30  # on a card that compiles it so much,
EAGER_BYTES = 2**31  # or so much, where the card launches each of its operations by itself.


@dataclass(frozen=True)
class _Kept:
    """Bytes a token that a forward keeps for its backward, in 16-bit autocast or in fp32.

    `channel` is for each layer and channel, `masks` more of it where there is dropout, `head` for each layer and head,
    `norms` for each layer, `position` for each layer and position of the context: what may be attended to, as numbers.
    `weights` is for each layer, head and position: what a fused attention spares; `single` more of `channel` where a
    layer has one head, whose values are not copied and keep what was projected with them.
    `around` is for each channel and no layer: at the top of the network when the loss is taken, and `backward` where
    instead the first layer's backward is at work.
    """

    channel: float
    masks: float
    head: float
    around: float
    backward: float
    norms: float = 16
    position: float = 0
    weights: float = 0
    single: float = 0


# For a faithful layer: the stream twice in fp32 (8), the two norms' results (4), queries, keys and values (6),
# attention's result (2), the wide layer before and after GELU (16). A modern one keeps queries and keys in fp32 besides
# (8), and its attention's result twice. A layer of an encoder-decoder is one of each, for as many tokens on each side.
_KEPT = {
    ("faithful", True): _Kept(36, 2, 4, 12, 18),
    ("faithful", False): _Kept(64, 2, 4, 12, 28),
    ("modern", True): _Kept(46, 2, 12, 16, 28),
    ("modern", False): _Kept(76, 2, 12, 16, 44),
    ("encoder-decoder", True): _Kept(82, 29, 12, 16, 16, norms=48, position=2),
    ("encoder-decoder", False): _Kept(120, 45, 12, 16, 40, norms=48, position=4),
}
# Without a fused attention, with dropout: its weights in fp32, which of them were dropped, and what was left.
_UNFUSED = {
    ("faithful", True): _Kept(46, 0, 0, 12, 18, norms=24, weights=12),
    ("faithful", False): _Kept(72, 0, 0, 12, 28, norms=24, weights=12, single=8),
    ("modern", True): _Kept(54, 0, 8, 16, 28, norms=8, weights=12),
    ("modern", False): _Kept(80, 0, 8, 16, 44, norms=8, weights=12),
    ("encoder-decoder", True): _Kept(142, 0, 0, 16, 16, norms=60, weights=36),
    ("encoder-decoder", False): _Kept(204, 0, 0, 16, 40, norms=60, weights=36),
}
_TOKEN_BYTES = 40  # Ids, targets, and the loss of each.


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is trained, as far as memory knows: what `way_of` reads from a recipe and an offer.

    `half` computes in 16 bits; `fused` is a card's attention, which has dropout too (a CPU's has not); `chunked` is
    the trainer's own loss, on a card `compiled` or `eager`; `muon` moves the matrices in the blocks with one moment;
    `gradient` is there already when a forward begins (a step in portions, or replicas); of `shards` processes each
    holds its part.
    """

    half: bool = True
    fused: bool = True
    chunked: bool = True
    compiled: bool = False
    eager: bool = False
    muon: bool = False
    gradient: bool = False
    shards: int = 1


ALONE = Way()
"""One process, in 16 bits, a step in one portion."""


@dataclass(frozen=True)
class _Sizes:
    """Numbers of weights: in all, in no block, in each block, in the head's matrix, in a block's widest matrix.

    Then bytes: what a forward keeps of its tokens, in each layer and in all; what comes on top of that while the loss
    is taken, and what a backward has at hand.
    """

    parameters: int
    root: int
    block: int
    head: int
    widest: int
    layer_bytes: float
    kept_bytes: float
    loss_bytes: float
    backward_bytes: float


def tensor_bytes(model: ModelConfig, micro_batch: int, vocab_size: int = 0, way: Way = ALONE) -> int:
    """The most that the tensors of one process take at once, by the highest of a step's moments."""
    sizes = _sizes(model, micro_batch, vocab_size, way)
    moments = _of_a_whole_model if way.shards == 1 else _of_a_share
    return int(max(moments(model, sizes, way)))


def _of_a_whole_model(model: ModelConfig, sizes: _Sizes, way: Way) -> Iterator[float]:
    """While the loss is taken; in the last layer's backward; at the end of backward; while the optimiser moves."""
    state = _state_bytes(model, sizes, way)
    forward = state + _copies_bytes(model, sizes, way) + _gradient_bytes(sizes, way) + sizes.kept_bytes
    yield forward + sizes.loss_bytes
    # Where a gradient is there already, that of a layer's widest matrix stands beside it until it is added.
    yield forward + max(sizes.backward_bytes + 4 * sizes.head, 4 * sizes.widest if way.gradient else 0)
    # A tied embedding's gradient is there three times: the loss's, its own, and their sum.
    whole = state + 4 * sizes.parameters
    yield whole + ((12 if way.gradient else 8) * sizes.head if model.tied else 0)
    yield whole + _muon_bytes(model, sizes, way)


def _of_a_share(model: ModelConfig, sizes: _Sizes, way: Way) -> Iterator[float]:
    """The same under FSDP2 (trainer/distributed.py), which fetches what is in no block for all of a step.

    A block is fetched when it is needed, in backward while the one behind it is at work; its gradient, once whole, is
    laid out again to be summed, and stays until the next one is. In portions the gradient stays whole, and adds up.
    """
    head = 4 * sizes.head
    state = _state_bytes(model, sizes, way) / way.shards + 4 * sizes.root
    forward = state + _copies_bytes(model, sizes, way) + _gradient_bytes(sizes, way) + sizes.kept_bytes
    yield forward + sizes.loss_bytes
    if not model.tied:
        yield forward + 3 * head  # As the loss made it, scaled, and copied for its parameter.
    waiting = 0 if way.gradient and not model.tied else head
    for done in {0, min(1, model.layers - 1), model.layers - 1}:
        yield from (forward + waiting + more for more in _of_a_block(model, sizes, way, done))
    summed = 4 * model.layers * sizes.block / way.shards + 4 * sizes.block
    own = 4 * sizes.root if way.gradient or not model.tied else 0  # Of a tied head it is the sum that comes below.
    yield state + max(summed + own, _gradient_bytes(sizes, way)) + (3 if model.tied else 1) * head
    yield state + 4 * sizes.parameters / way.shards + _muon_bytes(model, sizes, way)


def _of_a_block(model: ModelConfig, sizes: _Sizes, way: Way, done: int) -> Iterator[float]:
    """What the backward of a block adds to a share's forward, at its beginning and at its end, after `done` others."""
    block, copies = 4 * sizes.block, 2 * sizes.block if way.half else 0
    before = done * (block / way.shards - copies - sizes.layer_bytes) + (block if done else 0) + sizes.backward_bytes
    if way.gradient:
        before -= done * block
    yield before + 2 * block
    fetched = 2 if done < model.layers - 1 else 1
    if way.gradient:  # There each matrix's gradient is added to what is there already.
        yield before + fetched * block + 4 * sizes.widest
    else:
        yield before + fetched * block + block - copies - sizes.layer_bytes


def _sizes(model: ModelConfig, micro_batch: int, vocab_size: int, way: Way) -> _Sizes:
    tokens, vocab = micro_batch * model.context, padded_vocab(model, vocab_size)
    kept, width = (_KEPT if way.fused or not model.dropout else _UNFUSED)[model.preset, way.half], model.width
    parameters, root = parameters_of(model, vocab_size), _root_parameters(model, vocab_size)
    channel = kept.channel + (kept.masks if model.dropout else 0) + (kept.single if model.heads == 1 else 0)
    channel += (2 if way.half else 4) if model.value_mix else 0  # The values before they are mixed.
    # Each norm's result before its gains; of the two norms at the top one is there while the loss is taken, as well.
    gains = 4 * width if model.gains else 0
    channel += 8 if model.gains else 0
    layer = channel * width + kept.head * model.heads
    layer += kept.norms + (kept.position + kept.weights * model.heads) * model.context
    # The gradient of attention's weights, when that of the wide layer beside it is done with.
    attention = 4 * model.heads * model.context - (8 if way.half else 32) * width if kept.weights else 0
    return _Sizes(
        parameters=parameters,
        root=root,
        block=(parameters - root) // model.layers,
        head=vocab * width,
        widest=4 * width * width,
        layer_bytes=tokens * layer,
        kept_bytes=tokens * (model.layers * layer + _TOKEN_BYTES + (width if model.dropout else 0) + gains),
        loss_bytes=tokens * (kept.around * width + gains) + _loss_bytes(model, tokens, vocab, way),
        backward_bytes=tokens * max(kept.backward * width, attention),
    )


def _loss_bytes(model: ModelConfig, tokens: int, vocab: int, way: Way) -> int:
    """What the loss takes for itself: logits and their gradient, and of the head its gradient and its copies."""
    head, width = vocab * model.width, model.width
    if not way.chunked:
        # Log-softmax in fp32 4, its gradient 4 and in 16 bits 2, 16-bit logits 2 (in fp32 12 too); or, of few tokens,
        # what is left of them when the head's own gradient is made.
        return max(12 * tokens * vocab + 2 * head, 6 * tokens * vocab + (8 if model.tied else 6) * head)
    most = EAGER_BYTES if way.eager else CARD_BYTES if way.compiled else CHUNK_BYTES
    each = (16 if model.softcap else 4) * vocab
    chunk = min(tokens, 1 << max(0, (most // each).bit_length() - 1))
    capping = 12 * chunk * vocab if model.softcap else 0  # Logits in fp32, over the cap, and its curve.
    if not way.half:
        return max(4 * chunk * (vocab + width), capping) + 4 * head
    # Of the head its gradient and a 16-bit copy; the logits in fp32 and 16 bits, then what the gradient gets added.
    return 2 * chunk * width + 6 * head + max(6 * chunk * vocab, capping, 2 * chunk * vocab + 2 * head)


def _state_bytes(model: ModelConfig, sizes: _Sizes, way: Way) -> int:
    """Weights and the optimiser's moments: two each, of a matrix in a block under Muon one."""
    return 12 * sizes.parameters - (4 * model.layers * sizes.block if way.muon else 0)


def _copies_bytes(model: ModelConfig, sizes: _Sizes, way: Way) -> int:
    """The 16-bit copies of the matrices in the blocks, which a forward keeps for its backward."""
    return 2 * model.layers * sizes.block if way.half else 0


def _gradient_bytes(sizes: _Sizes, way: Way) -> int:
    return 4 * sizes.parameters if way.gradient else 0


def _muon_bytes(model: ModelConfig, sizes: _Sizes, way: Way) -> int:
    """Muon's orthogonal updates of the largest stack: the matrices of one shape, as many as the trainer takes at once.

    Those are the square ones or the widest, of all blocks.
    """
    square, widest = MUON_ALIKE[model.preset]
    alike = {model.width**2: square * model.layers, sizes.widest: widest * model.layers}
    most = (min(count, max(1, MUON_STACK // size)) * size for size, count in alike.items())
    return 6 * max(most) if way.muon else 0


@cache
def _root_parameters(model: ModelConfig, vocab_size: int) -> int:
    """The parameters that belong to no block: what a model has for each layer more, taken off for all of them."""
    parameters = parameters_of(model, vocab_size)
    block = parameters_of(replace(model, layers=model.layers + 1), vocab_size) - parameters
    return parameters - model.layers * block


GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 2  # CUDA, cuBLAS and NCCL, measured as 1 to 2 GiB.
FRAGMENTATION = 1.05
USABLE_SHARE = 0.92
MUON_STACK = 1 << 25  # Weights, as trainer/optim.py has it.
MUON_ALIKE = {"faithful": (1, 1), "modern": (4, 1), "encoder-decoder": (12, 2)}
"""How many square matrices there are to a layer of the recipe, and how many of the widest shape."""
REPLICA_BYTES, REPLICA_SHARE = 18, 0.75
"""The trainer's own switch (trainer/distributed.py): where so many bytes a parameter are above this share of a card."""


def peak_bytes(
    model: ModelConfig, micro_batch: int, vocab_size: int = 0, way: Way = ALONE, beyond_bytes: int = 0
) -> int:
    """The most memory one GPU holds at once, everything included: tensors, the allocator's gaps, CUDA itself.

    `beyond_bytes` are those of tensors that a trace has found and the formula has not.
    """
    tensors = max(0, tensor_bytes(model, micro_batch, vocab_size, way) + beyond_bytes)
    return int(tensors * FRAGMENTATION) + CONTEXT_BYTES


def count_weight_shards(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """Among how many processes the trainer shares the weights: all under FSDP, else 1.

    Where the recipe leaves it open, all share what the trainer by itself would share, and what else would not fit.
    """
    wanted, model = recipe.tables.train.parallel, recipe.tables.model
    if processes == 1 or not offer.gpu_count or wanted == "ddp":
        return 1
    if wanted == "fsdp" or REPLICA_BYTES * recipe.parameters(vocab_size) > REPLICA_SHARE * offer.vram_gb * GIB:
        return processes
    replica = peak_bytes(model, 1, vocab_size, _way(recipe, offer, gradient=True, shards=1), recipe.beyond_formula(1))
    return 1 if replica <= usable_bytes(offer, processes) else processes


def way_of(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> Way:
    """How an offer's machine trains a recipe with a micro-batch."""
    shards = count_weight_shards(recipe, offer, processes, vocab_size)
    in_portions = recipe.tables.train.batch_tokens > recipe.tables.model.context * processes * micro_batch
    return _way(recipe, offer, gradient=in_portions or (processes > 1 and shards == 1), shards=shards)


def _way(recipe: ResolvedRecipe, offer: Offer, *, gradient: bool, shards: int) -> Way:
    train, on_card = recipe.tables.train, bool(offer.gpu_count)
    half = train.precision != "fp32" if on_card else train.precision in ("bf16", "fp16")
    muon, chunked = recipe.tables.optim.kind == "muon", train.loop == "own"
    compiled, eager = on_card and train.compile, on_card and not train.compile
    return Way(
        half=half, fused=on_card, chunked=chunked, compiled=compiled, eager=eager, muon=muon, gradient=gradient,
        shards=shards,
    )  # fmt: skip


def peak_on(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> int:
    """The most memory that a GPU of an offer holds with a micro-batch of this recipe."""
    way = way_of(recipe, offer, processes, micro_batch, vocab_size)
    return peak_bytes(recipe.tables.model, micro_batch, vocab_size, way, recipe.beyond_formula(micro_batch))


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


_LEAST = "micro_batch 1 needs"


def what_would_fit(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> str:
    """One clause: what a micro-batch of one sequence needs, what there is, and which cuts would do.

    Where several cards would hold the model in shares, which the recipe forbids, that comes first.
    """
    peak = peak_on(recipe, offer, processes, 1, vocab_size)
    needs = f"{_LEAST} {peak / GIB:.1f} GiB, {USABLE_SHARE:.0%} of {memory_gib(offer, processes):g} GiB are usable"

    def fits(other: ResolvedRecipe) -> bool:
        return peak_on(other, offer, processes, 1, vocab_size) <= usable_bytes(offer, processes)

    cuts = list(_cuts(recipe, processes, fits))
    if recipe.tables.train.parallel == "ddp" and fits(_changed(recipe, "train", parallel="fsdp")):
        cuts.insert(0, "parallel ddp -> fsdp")
    if not cuts:
        return f"{needs}: no cut of context, layers or width alone would fit"
    return f"{needs}: {' or '.join(cuts)} would fit"


def lacks_memory(basis: str) -> bool:
    """Whether this is what an estimate rests on that found no room for one sequence."""
    return basis.startswith(_LEAST)


def _changed(recipe: ResolvedRecipe, table: str, **keys: Any) -> ResolvedRecipe:
    tables = recipe.tables
    changed: dict[str, Any] = {table: replace(getattr(tables, table), **keys)}
    return replace(recipe, tables=replace(tables, **changed))


def _cuts(recipe: ResolvedRecipe, processes: int, fits: Callable[[ResolvedRecipe], bool]) -> Iterator[str]:
    """The largest value of each dimension that fits, among those that the rest of the recipe allows."""
    model, batch = recipe.tables.model, recipe.tables.train.batch_tokens
    unit = model.heads * (2 if model.preset == "modern" else 1)
    allowed: dict[str, Sequence[int]] = {
        "context": [size for size in divisors(batch // processes) if size < model.context],
        "layers": range(1, model.layers),
        "width": range(unit, model.width, unit),
    }
    for name, values in allowed.items():

        def is_too_large(value: int, name: str = name) -> bool:
            return not fits(_changed(recipe, "model", **{name: value}))

        # What is smaller than one that fits does so too.
        if place := bisect_left(values, True, key=is_too_large):
            yield f"{name} {getattr(model, name)} -> {values[place - 1]}"
