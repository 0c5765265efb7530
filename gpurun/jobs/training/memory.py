"""Computes a GPU's peak memory, the micro-batch that fits, and which dimension to reduce if no micro-batch fits.

The formulas count the tensors that exist at each moment of a training step. torch's MemTracker gives the same results
for a real step (trainer/traced_memory.py). Memory depends on N tokens, C channels, L layers, H heads, the vocabulary V
and P parameters.
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

CHUNK_BYTES = 2**28  # The most bytes of fp32 logits that the trainer's loss has at the same time on a CPU.
CARD_BYTES = 2**30  # The same on a GPU with a compiled loss.
EAGER_BYTES = 2**31  # The same on a GPU without compilation.


@dataclass(frozen=True)
class _Kept:
    """Bytes per token that a forward pass keeps for its backward pass, in 16-bit autocast or in fp32.

    Counted once per layer:
    - `channel`: per channel
    - `head`: per head
    - `norms`: a constant
    - `position`: per position of the context (the attention mask as numbers)
    - `weights`: per head and position; only without a fused attention
    - `masks`: per channel; only with dropout
    - `single`: per channel; only with a single head, whose values are not copied

    Counted once per network:
    - `around`: per channel, during the loss
    - `backward`: per channel, during the last layer's backward pass
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


# Bytes of a faithful layer: the residual stream twice in fp32 (8), the results of two norms (4), queries, keys, values
# (6), the result of attention (2), the wide layer before and after GELU (16). A modern layer also keeps queries and
# keys in fp32 (8), and the result of attention twice. A layer of an encoder-decoder is an encoder layer plus a decoder
# layer with equally many tokens.
_KEPT = {
    ("faithful", True): _Kept(36, 2, 4, 12, 18),
    ("faithful", False): _Kept(64, 2, 4, 12, 28),
    ("modern", True): _Kept(46, 2, 12, 16, 28),
    ("modern", False): _Kept(76, 2, 12, 16, 44),
    ("encoder-decoder", True): _Kept(82, 29, 12, 16, 16, norms=48, position=2),
    ("encoder-decoder", False): _Kept(120, 45, 12, 16, 40, norms=48, position=4),
}
# Without a fused attention, dropout keeps three tensors: the fp32 weights, the dropout mask, the weights after dropout.
_UNFUSED = {
    ("faithful", True): _Kept(46, 0, 0, 12, 18, norms=24, weights=12),
    ("faithful", False): _Kept(72, 0, 0, 12, 28, norms=24, weights=12, single=8),
    ("modern", True): _Kept(54, 0, 8, 16, 28, norms=8, weights=12),
    ("modern", False): _Kept(80, 0, 8, 16, 44, norms=8, weights=12),
    ("encoder-decoder", True): _Kept(142, 0, 0, 16, 16, norms=60, weights=36),
    ("encoder-decoder", False): _Kept(204, 0, 0, 16, 40, norms=60, weights=36),
}
_TOKEN_BYTES = 40  # Token ids, targets and losses.


@dataclass(frozen=True, kw_only=True)
class Way:
    """The aspects of training that affect memory. `way_of` derives them from a recipe and an offer.

    - `half`: computing uses 16 bits.
    - `fused`: attention is a GPU's fused kernel, which includes dropout.
    - `chunked`: the loss is the trainer's own; on a GPU it is also `compiled` or `eager`.
    - `muon`: the matrices of the blocks have only one moment.
    - `gradient`: gradients already exist when a forward pass begins (several micro-batches, or replicas).
    - `shards`: the number of processes that share the weights; with 1 each process has all of them.
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
"""The default: one process that computes in 16 bits, with one micro-batch per step."""


@dataclass(frozen=True)
class _Sizes:
    """The sizes from which the bytes of a training step are computed.

    Numbers of weights:
    - `parameters`: in total
    - `root`: weights outside the blocks
    - `block`: weights of one block
    - `head`: weights of the head
    - `widest`: weights of a block's widest matrix

    Bytes:
    - `layer_bytes`: what a forward pass keeps per layer
    - `kept_bytes`: what a forward pass keeps in total
    - `loss_bytes`: what the loss adds to that
    - `backward_bytes`: what the last layer's backward pass adds to that
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
    """Return the peak bytes of one process's tensors during a training step."""
    sizes = _compute_sizes(model, micro_batch, vocab_size, way)
    moments = _step_memory_unsharded if way.shards == 1 else _moments_sharded
    return int(max(moments(model, sizes, way)))


def _step_memory_unsharded(model: ModelConfig, sizes: _Sizes, way: Way) -> Iterator[float]:
    """Yield the bytes at four moments: the loss, the last layer's backward pass, its end, and the optimiser step."""
    state = _state_bytes(model, sizes, way)
    forward = state + _copies_bytes(model, sizes, way) + _gradient_bytes(sizes, way) + sizes.kept_bytes
    yield forward + sizes.loss_bytes
    # If gradients already exist, a layer's widest matrix has two until the new gradient is added to the existing one.
    yield forward + max(sizes.backward_bytes + 4 * sizes.head, 4 * sizes.widest if way.gradient else 0)
    # A tied embedding has three gradients: that of the loss, that of the embedding, and their sum.
    whole = state + 4 * sizes.parameters
    yield whole + ((12 if way.gradient else 8) * sizes.head if model.tied else 0)
    yield whole + _muon_bytes(model, sizes, way)


def _moments_sharded(model: ModelConfig, sizes: _Sizes, way: Way) -> Iterator[float]:
    """Yield the bytes at the moments of a step under FSDP2 (trainer/distributed.py).

    Once per step, FSDP2 gathers the weights outside the blocks. It gathers a block's weights when they are needed; in
    the backward pass, while the previous block still runs. A block's gradient is copied into a buffer for the
    reduction, and exists until the next block's gradient is complete. With several micro-batches the gradients are not
    sharded, and accumulate.
    """
    head = 4 * sizes.head
    state = _state_bytes(model, sizes, way) / way.shards + 4 * sizes.root
    forward = state + _copies_bytes(model, sizes, way) + _gradient_bytes(sizes, way) + sizes.kept_bytes
    yield forward + sizes.loss_bytes
    if not model.tied:
        yield forward + 3 * head  # The head's gradient: as the loss computed it, scaled, and copied for its parameter.
    waiting = 0 if way.gradient and not model.tied else head
    for done in {0, min(1, model.layers - 1), model.layers - 1}:
        yield from (forward + waiting + more for more in _block_moments(model, sizes, way, done))
    summed = 4 * model.layers * sizes.block / way.shards + 4 * sizes.block
    # The gradient of a tied head is included in the sum below.
    own = 4 * sizes.root if way.gradient or not model.tied else 0
    yield state + max(summed + own, _gradient_bytes(sizes, way)) + (3 if model.tied else 1) * head
    yield state + 4 * sizes.parameters / way.shards + _muon_bytes(model, sizes, way)


def _block_moments(model: ModelConfig, sizes: _Sizes, way: Way, done: int) -> Iterator[float]:
    """Yield the bytes that a block's backward pass adds under FSDP2, at its beginning and end.

    `done` is the number of blocks that have done their backward pass before.
    """
    block, copies = 4 * sizes.block, 2 * sizes.block if way.half else 0
    before = done * (block / way.shards - copies - sizes.layer_bytes) + (block if done else 0) + sizes.backward_bytes
    if way.gradient:
        before -= done * block
    yield before + 2 * block
    fetched = 2 if done < model.layers - 1 else 1
    if way.gradient:  # Each matrix's gradient is added to the existing one.
        yield before + fetched * block + 4 * sizes.widest
    else:
        yield before + fetched * block + block - copies - sizes.layer_bytes


def _compute_sizes(model: ModelConfig, micro_batch: int, vocab_size: int, way: Way) -> _Sizes:
    tokens, vocab = micro_batch * model.context, padded_vocab(model, vocab_size)
    kept, width = (_KEPT if way.fused or not model.dropout else _UNFUSED)[model.preset, way.half], model.width
    parameters, root = parameters_of(model, vocab_size), _root_parameters(model, vocab_size)
    channel = kept.channel + (kept.masks if model.dropout else 0) + (kept.single if model.heads == 1 else 0)
    channel += (2 if way.half else 4) if model.value_mix else 0  # The values before they are mixed.
    # The result of each norm before its gains are applied; one of the two final norms also exists during the loss.
    gains = 4 * width if model.gains else 0
    channel += 8 if model.gains else 0
    layer = channel * width + kept.head * model.heads
    layer += kept.norms + (kept.position + kept.weights * model.heads) * model.context
    # The gradient of the attention weights. The gradient of the wide layer was released before.
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
    """Return the bytes of the loss itself: logits and their gradient, and the head's gradient and copies."""
    head, width = vocab * model.width, model.width
    if not way.chunked:
        # Bytes per logit: log-softmax in fp32 (4), its gradient in fp32 (4) and 16 bits (2), and 16-bit logits (2). In
        # fp32 the sum is 12 as well. With few tokens the peak comes later, when the head's own gradient is computed.
        return max(12 * tokens * vocab + 2 * head, 6 * tokens * vocab + (8 if model.tied else 6) * head)
    most = EAGER_BYTES if way.eager else CARD_BYTES if way.compiled else CHUNK_BYTES
    each = (16 if model.softcap else 4) * vocab
    chunk = min(tokens, 1 << max(0, (most // each).bit_length() - 1))
    capping = 12 * chunk * vocab if model.softcap else 0  # Logits in fp32, divided by the cap, and capped.
    if not way.half:
        return max(4 * chunk * (vocab + width), capping) + 4 * head
    # The head's gradient and a 16-bit copy; then the logits in fp32 and 16 bits, or the addend of the gradient.
    return 2 * chunk * width + 6 * head + max(6 * chunk * vocab, capping, 2 * chunk * vocab + 2 * head)


def _state_bytes(model: ModelConfig, sizes: _Sizes, way: Way) -> int:
    """Return the bytes of weights and optimiser moments: two moments, or one for a block's matrices under Muon."""
    return 12 * sizes.parameters - (4 * model.layers * sizes.block if way.muon else 0)


def _copies_bytes(model: ModelConfig, sizes: _Sizes, way: Way) -> int:
    """Return the bytes of the 16-bit copies of the blocks' matrices, which exist until the backward pass."""
    return 2 * model.layers * sizes.block if way.half else 0


def _gradient_bytes(sizes: _Sizes, way: Way) -> int:
    return 4 * sizes.parameters if way.gradient else 0


def _muon_bytes(model: ModelConfig, sizes: _Sizes, way: Way) -> int:
    """Return the bytes that Muon needs to update its largest stack of matrices.

    The trainer updates matrices of the same shape together, as a stack. The largest stack consists of the square
    matrices or of the widest matrices.
    """
    square, widest = MUON_ALIKE[model.preset]
    alike = {model.width**2: square * model.layers, sizes.widest: widest * model.layers}
    most = (min(count, max(1, MUON_STACK // size)) * size for size, count in alike.items())
    return 6 * max(most) if way.muon else 0


@cache
def _root_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters outside the blocks: the total minus the parameters of all blocks."""
    parameters = parameters_of(model, vocab_size)
    block = parameters_of(replace(model, layers=model.layers + 1), vocab_size) - parameters
    return parameters - model.layers * block


GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 2  # For CUDA, cuBLAS and NCCL; 1 to 2 GiB were measured.
FRAGMENTATION = 1.05
USABLE_SHARE = 0.92
MUON_STACK = 1 << 25  # The most weights that are updated together, as in trainer/optim.py.
MUON_ALIKE = {"faithful": (1, 1), "modern": (4, 1), "encoder-decoder": (12, 2)}
"""How many square matrices, and how many of the widest matrices, a layer has."""
REPLICA_BYTES, REPLICA_SHARE = 18, 0.75
"""The trainer shards weights if REPLICA_BYTES per parameter exceed REPLICA_SHARE of a GPU (trainer/distributed.py)."""


def peak_bytes(
    model: ModelConfig, micro_batch: int, vocab_size: int = 0, way: Way = ALONE, beyond_bytes: int = 0
) -> int:
    """Return the peak bytes of one GPU: tensors, the allocator's fragmentation, and CUDA's own memory.

    `beyond_bytes` are the bytes of tensors that a trace found in addition to the formula.
    """
    tensors = max(0, tensor_bytes(model, micro_batch, vocab_size, way) + beyond_bytes)
    return int(tensors * FRAGMENTATION) + CONTEXT_BYTES


def count_weight_shards(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """Return over how many processes the trainer shards the weights: all of them under FSDP, else 1.

    If the recipe leaves it open, the weights are sharded if the trainer would shard them, or if whole weights would not
    fit.
    """
    parallel, model = recipe.tables.train.parallel, recipe.tables.model
    if processes == 1 or not offer.gpu_count or parallel == "ddp":
        return 1
    if parallel == "fsdp" or REPLICA_BYTES * recipe.parameters(vocab_size) > REPLICA_SHARE * offer.vram_gb * GIB:
        return processes
    replica = peak_bytes(
        model, 1, vocab_size, _choose_way(recipe, offer, gradient=True, shards=1), recipe.beyond_formula(1)
    )
    return 1 if replica <= usable_bytes(offer, processes) else processes


def way_of(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> Way:
    """Return the aspects that affect memory when an offer's machine trains a recipe with this micro-batch."""
    shards = count_weight_shards(recipe, offer, processes, vocab_size)
    in_portions = recipe.tables.train.batch_tokens > recipe.tables.model.context * processes * micro_batch
    return _choose_way(recipe, offer, gradient=in_portions or (processes > 1 and shards == 1), shards=shards)


def _choose_way(recipe: ResolvedRecipe, offer: Offer, *, gradient: bool, shards: int) -> Way:
    train, on_card = recipe.tables.train, bool(offer.gpu_count)
    half = train.precision != "fp32" if on_card else train.precision in ("bf16", "fp16")
    muon, chunked = recipe.tables.optim.kind == "muon", train.loop == "own"
    compiled, eager = on_card and train.compile, on_card and not train.compile
    return Way(
        half=half, fused=on_card, chunked=chunked, compiled=compiled, eager=eager, muon=muon, gradient=gradient,
        shards=shards,
    )  # fmt: skip


def peak_on(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> int:
    """Return the peak bytes of one of an offer's GPUs with this micro-batch."""
    way = way_of(recipe, offer, processes, micro_batch, vocab_size)
    return peak_bytes(recipe.tables.model, micro_batch, vocab_size, way, recipe.beyond_formula(micro_batch))


def fitting_micro_batch(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """Return the largest micro-batch that fits and divides the batch, at most the recipe's; 0 if none fits."""
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
    """Return all divisors of a number in order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def memory_gib(offer: Offer, processes: int = 1) -> float:
    """Return the GiB per process: a GPU's memory, or a share of a CPU machine's memory; infinite if unknown."""
    return offer.vram_gb if offer.gpu_count else offer.memory_gb / processes or inf


def usable_bytes(offer: Offer, processes: int = 1) -> float:
    """Return the bytes per process that a plan may use."""
    return memory_gib(offer, processes) * GIB * USABLE_SHARE


def what_would_fit(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> str:
    """Return a clause for a message: the memory that one sequence needs, the usable memory, and reductions that fit.

    If the recipe would fit with sharding over several GPUs but forbids it, sharding is suggested first.
    """
    peak = peak_on(recipe, offer, processes, 1, vocab_size)
    usable = f"{USABLE_SHARE:.0%} of {memory_gib(offer, processes):g} GiB are usable"
    needs = f"micro_batch 1 needs {peak / GIB:.1f} GiB, {usable}"

    def fits(other: ResolvedRecipe) -> bool:
        return peak_on(other, offer, processes, 1, vocab_size) <= usable_bytes(offer, processes)

    cuts = list(_suggest_reductions(recipe, processes, fits))
    if recipe.tables.train.parallel == "ddp" and fits(_change_table(recipe, "train", parallel="fsdp")):
        cuts.insert(0, "parallel ddp -> fsdp")
    if not cuts:
        return f"{needs}: reducing only context, layers or width would not be enough"
    return f"{needs}: {' or '.join(cuts)} would fit"


def _change_table(recipe: ResolvedRecipe, table: str, **keys: Any) -> ResolvedRecipe:
    tables = recipe.tables
    changed: dict[str, Any] = {table: replace(getattr(tables, table), **keys)}
    return replace(recipe, tables=replace(tables, **changed))


def _suggest_reductions(
    recipe: ResolvedRecipe, processes: int, fits: Callable[[ResolvedRecipe], bool]
) -> Iterator[str]:
    """Yield, for each dimension, a reduction to the largest value that fits and that the rest of the recipe allows."""
    model, batch = recipe.tables.model, recipe.tables.train.batch_tokens
    unit = model.heads * (2 if model.preset == "modern" else 1)
    allowed: dict[str, Sequence[int]] = {
        "context": [size for size in divisors(batch // processes) if size < model.context],
        "layers": range(1, model.layers),
        "width": range(unit, model.width, unit),
    }
    for name, values in allowed.items():

        def is_too_large(value: int, name: str = name) -> bool:
            return not fits(_change_table(recipe, "model", **{name: value}))

        # If a value fits, all smaller values also fit.
        if place := bisect_left(values, True, key=is_too_large):
            yield f"{name} {getattr(model, name)} -> {values[place - 1]}"
