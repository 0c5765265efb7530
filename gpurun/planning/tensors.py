"""How much memory the tensors of a training step take at most, counted one by one at its moments.

What is counted is what the trainer's step keeps; torch's MemTracker on the real step agrees (tests/traced_memory.py).
N tokens of C channels in L layers with H heads, V the vocabulary, P parameters. All of it grows with each of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from gpurun.planning.recipe import padded_vocab, parameters_of
from gpurun.planning.tables import ModelTable

__all__ = ["ALONE", "Way", "tensor_bytes"]

CHUNK_BYTES = 2**28  # The trainer's own loss holds so much of fp32 logits at once.


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
    the trainer's own loss; `muon` moves the matrices in the blocks with one moment; `gradient` is there already when a
    forward begins (a step in portions, or replicas); of `shards` processes each holds its part.
    """

    half: bool = True
    fused: bool = True
    chunked: bool = True
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


def tensor_bytes(model: ModelTable, micro_batch: int, vocab_size: int = 0, way: Way = ALONE) -> int:
    """The most that the tensors of one process take at once, by the highest of a step's moments."""
    sizes = _sizes(model, micro_batch, vocab_size, way)
    moments = _of_a_whole_model if way.shards == 1 else _of_a_share
    return int(max(moments(model, sizes, way)))


def _of_a_whole_model(model: ModelTable, sizes: _Sizes, way: Way) -> Iterator[float]:
    """While the loss is taken; in the last layer's backward; at the end of backward; while the optimiser moves."""
    state = _state_bytes(model, sizes, way)
    forward = state + _copies_bytes(model, sizes, way) + _gradient_bytes(sizes, way) + sizes.kept_bytes
    yield forward + sizes.loss_bytes
    # Where a gradient is there already, that of a layer's widest matrix stands beside it until it is added.
    yield forward + max(sizes.backward_bytes + 4 * sizes.head, 4 * sizes.widest if way.gradient else 0)
    # A tied embedding's gradient is there three times: the loss's, its own, and their sum.
    whole = state + 4 * sizes.parameters
    yield whole + ((12 if way.gradient else 8) * sizes.head if model.tied else 0)
    yield whole + _muon_bytes(sizes, way)


def _of_a_share(model: ModelTable, sizes: _Sizes, way: Way) -> Iterator[float]:
    """The same under FSDP2 (trainer/parallel.py), which fetches what is in no block for all of a forward and backward.

    A block is fetched when it is needed, in backward while the one behind it is at work; its gradient, once whole, is
    laid out anew to be summed, and stays until the next one is. In portions the gradient stays whole, and adds up.
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
    yield state + 4 * sizes.parameters / way.shards + _muon_bytes(sizes, way)


def _of_a_block(model: ModelTable, sizes: _Sizes, way: Way, done: int) -> Iterator[float]:
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


def _sizes(model: ModelTable, micro_batch: int, vocab_size: int, way: Way) -> _Sizes:
    tokens, vocab = micro_batch * model.context, padded_vocab(model, vocab_size)
    kept, width = (_KEPT if way.fused or not model.dropout else _UNFUSED)[model.preset, way.half], model.width
    parameters, root = parameters_of(model, vocab_size), _root_parameters(model, vocab_size)
    channel = kept.channel + (kept.masks if model.dropout else 0) + (kept.single if model.heads == 1 else 0)
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
        kept_bytes=tokens * (model.layers * layer + _TOKEN_BYTES + (width if model.dropout else 0)),
        loss_bytes=tokens * kept.around * width + _loss_bytes(model, tokens, vocab, way),
        backward_bytes=tokens * max(kept.backward * width, attention),
    )


def _loss_bytes(model: ModelTable, tokens: int, vocab: int, way: Way) -> int:
    """What the loss takes for itself: logits and their gradient, and of the head its gradient and its copies."""
    head, width = vocab * model.width, model.width
    if not way.chunked:
        # Log-softmax in fp32 4, its gradient 4 and in 16 bits 2, 16-bit logits 2 (in fp32 12 too); or, of few tokens,
        # what is left of them when the head's own gradient is made.
        return max(12 * tokens * vocab + 2 * head, 6 * tokens * vocab + (8 if model.tied else 6) * head)
    chunk = min(tokens, 1 << max(0, (CHUNK_BYTES // (4 * vocab)).bit_length() - 1))
    return chunk * (vocab * (6 if way.half else 4) + 4 * width) + 8 * head


def _state_bytes(model: ModelTable, sizes: _Sizes, way: Way) -> int:
    """Weights and the optimiser's moments: two each, of a matrix in a block under Muon one."""
    return 12 * sizes.parameters - (4 * model.layers * sizes.block if way.muon else 0)


def _copies_bytes(model: ModelTable, sizes: _Sizes, way: Way) -> int:
    """The 16-bit copies of the matrices in the blocks, which a forward keeps for its backward."""
    return 2 * model.layers * sizes.block if way.half else 0


def _gradient_bytes(sizes: _Sizes, way: Way) -> int:
    return 4 * sizes.parameters if way.gradient else 0


def _muon_bytes(sizes: _Sizes, way: Way) -> int:
    """Its orthogonal update of the largest matrix."""
    return 9 * sizes.widest if way.muon else 0


@cache
def _root_parameters(model: ModelTable, vocab_size: int) -> int:
    """The parameters that belong to no block: what a model has for each layer more, taken off for all of them."""
    parameters = parameters_of(model, vocab_size)
    block = parameters_of(model.model_copy(update={"layers": model.layers + 1}), vocab_size) - parameters
    return parameters - model.layers * block
