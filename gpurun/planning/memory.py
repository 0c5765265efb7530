"""How much memory one GPU holds at most, by a formula fitted to measured peaks, and which micro-batch that leaves."""

from __future__ import annotations

from gpurun.core.model import Offer
from gpurun.planning.recipe import ResolvedRecipe, padded_vocab, parameters_of
from gpurun.planning.tables import ModelTable

GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 2  # CUDA, cuBLAS and NCCL, measured as 1 to 2 GiB.
FRAGMENTATION = 1.05
USABLE_SHARE = 0.92
# A token, layer and channel, 16-bit autocast and flash attention, eager: fitted; traced with torch's MemTracker.
# The encoder-decoder's is traced with its dropout of 0.1, and with the path on which attention's weights are kept.
ACTIVATION_BYTES = {"faithful": 36.5, "modern": 47.5, "encoder-decoder": 187.0}
LOGIT_BYTES = 14  # 16-bit logits 2, their fp32 copy 4, log-softmax 4, gradient 4.
CHUNK_LOGITS = 2**26  # The trainer's own loss holds 256 MiB of fp32 logits at once.
REPLICA_BYTES, REPLICA_SHARE = 18, 0.75
"""The trainer's switch (trainer/parallel.py): where so many bytes a parameter are more than this share of a card."""


def peak_bytes(
    model: ModelTable,
    micro_batch: int,
    vocab_size: int = 0,
    *,
    half: bool = True,
    chunked: bool = True,
    shards: int = 1,
) -> int:
    """The most memory one GPU holds at once, everything included.

    14 P + B T (36.5 C L + 14 V) was fitted within 1 % to nanoGPT's measured peaks (the modern blocks keep queries and
    keys in fp32, so that 36.5 is 47.5); a `chunked` loss holds the logits of one chunk at a time, and without `half`
    (16 bits) activations are twice as large. The second peak, at the end of backward, is 20 P: weights, AdamW,
    gradients, DDP's buckets. Of `shards` processes under FSDP2 each holds its part of weights, gradients and AdamW, all
    16-bit copies that backward needs, and in fp32 what is fetched: two blocks, and what belongs to no block. That
    follows from the trainer's code (trainer/parallel.py); it has not been measured.
    """
    tokens, vocab = micro_batch * model.context, padded_vocab(model, vocab_size)
    logits = tokens * vocab
    if chunked:
        logits = min(logits, max(CHUNK_LOGITS, vocab))
    activations = ACTIVATION_BYTES[model.preset] * (1 if half else 2) * tokens * model.width * model.layers
    forward, end = _weight_bytes(model, vocab_size, shards)
    return int(max(forward + activations + LOGIT_BYTES * logits, end) * FRAGMENTATION) + CONTEXT_BYTES


def _weight_bytes(model: ModelTable, vocab_size: int, shards: int) -> tuple[float, float]:
    """What weights, gradients and AdamW take at the end of a forward, and at the end of a backward."""
    parameters = parameters_of(model, vocab_size)
    if shards == 1:
        return 14.0 * parameters, 20.0 * parameters
    block = parameters_of(model.model_copy(update={"layers": model.layers + 1}), vocab_size) - parameters
    root = parameters - model.layers * block
    return 12 * parameters / shards + 2 * parameters + 4 * (root + 2 * block), 16 * parameters / shards + 8 * root


def shards_of(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """Among how many processes the trainer shares the weights: all under FSDP, else 1; it decides by the same rule."""
    wanted = recipe.tables.train.parallel
    if processes == 1 or not offer.gpu_count or wanted == "ddp":
        return 1
    replica = REPLICA_BYTES * parameters_of(recipe.tables.model, vocab_size)
    return processes if wanted == "fsdp" or replica > REPLICA_SHARE * offer.vram_gb * GIB else 1


def peak_on(recipe: ResolvedRecipe, offer: Offer, processes: int, micro_batch: int, vocab_size: int = 0) -> int:
    """The most memory that a GPU of an offer holds with a micro-batch of this recipe."""
    train = recipe.tables.train
    return peak_bytes(
        recipe.tables.model,
        micro_batch,
        vocab_size,
        half=bool(offer.gpu_count) and train.precision != "fp32",
        chunked=train.loop == "own",
        shards=shards_of(recipe, offer, processes, vocab_size),
    )


def fitting_micro_batch(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """The largest micro-batch that fits, is no larger than the recipe's and divides its batch; 0 when there is none."""
    train = recipe.tables.train
    sequences, left = divmod(train.batch_tokens, recipe.tables.model.context * processes)
    usable = offer.vram_gb * GIB * USABLE_SHARE if offer.gpu_count else float("inf")
    if left:
        return 0
    for size in range(min(train.micro_batch, sequences), 0, -1):
        if sequences % size == 0 and peak_on(recipe, offer, processes, size, vocab_size) <= usable:
            return size
    return 0
