"""Does it fit, how fast is it, how long does it take: before anything is rented.

Memory is a formula fitted to measured peaks. Speed is a prior, hence a range; `Estimate.basis` says what it rests on.
FLOPs a token are 6 N + 12 L C T: N the parameters that are multiplied with (all but the positions, a tied head counted
once), L layers, C width, T context: the convention of nanoGPT and of the PaLM paper, attention counted whole. A layer
of an encoder-decoder has three attentions, hence 36 L C T; its sentences are counted as long as the context, all.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpurun.core.model import Offer
from gpurun.core.plan import Estimate
from gpurun.planning.catalog import Card, card_of
from gpurun.planning.recipe import ResolvedRecipe, padded_vocab, parameters_of
from gpurun.planning.tables import ModelTable

GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 2  # CUDA, cuBLAS and NCCL, measured as 1 to 2 GiB.
FRAGMENTATION = 1.05
USABLE_SHARE = 0.92
# A token, layer and channel, bf16 autocast and flash attention, eager: fitted; traced with torch's MemTracker.
# The encoder-decoder's is traced with its dropout of 0.1, and with the path on which attention's weights are kept.
ACTIVATION_BYTES = {"faithful": 36.5, "modern": 47.5, "encoder-decoder": 187.0}
ATTENTIONS = {"faithful": 1, "modern": 1, "encoder-decoder": 3}
LOGIT_BYTES = 14  # bf16 logits 2, their fp32 copy 4, log-softmax 4, gradient 4.
CHUNK_LOGITS = 2**27  # The trainer's loss holds 512 MiB of fp32 logits at once.

CORE_FLOPS = (5e9, 60e9)
CPU_STEP_S = (0.003, 0.05)  # One optimiser step's overhead on a CPU, whatever the model.
LAUNCH_S = (0.0002, 0.0015)  # Launching one layer's kernels, forward and backward, eager.
GPU_STEP_S = (0.001, 0.005)  # One optimiser step's overhead on a GPU.
START_S = (10.0, 40.0)  # Importing torch, opening the data, the first step.
COMPILE_S = (30.0, 120.0)
PCIE_SCALING, SXM_SCALING = (0.85, 0.97), (0.95, 1.0)


@dataclass(frozen=True)
class _Speed:
    """FLOP/s of the whole machine, and seconds a step that no FLOP/s shorten: each (low, high) as for speed."""

    flops: tuple[float, float]
    overhead_s: tuple[float, float]
    start_s: tuple[float, float]
    words: str


def estimate(recipe: ResolvedRecipe, offer: Offer, *, vocab_size: int = 0, cpu_cores: int = 2) -> Estimate:
    """What a recipe needs on an offer. `vocab_size` is the tokeniser's, for a recipe that leaves it open.

    `train_s` runs from the trainer's start to its end: start, compile, steps, evaluation. Where the batch cannot be
    shared among the offer's GPUs or one sequence does not fit, `fits` is False and there is no time.
    """
    model, train = recipe.tables.model, recipe.tables.train
    processes = offer.gpu_count or recipe.processes
    micro_batch = fitting_micro_batch(recipe, offer, processes, vocab_size)
    peak = peak_bytes(model, max(1, micro_batch), vocab_size, bf16=_in_bf16(recipe, offer))
    if train.batch_tokens % (model.context * processes):
        sequences = f"sequences of {model.context}"
        why = f"{train.batch_tokens} tokens a step cannot be shared among {processes} processes in {sequences}"
        return _unfit(peak, why)
    if not micro_batch:
        return _unfit(
            peak, f"one sequence takes {peak / GIB:.1f} GiB, {USABLE_SHARE:.0%} of {offer.vram_gb} GiB are usable"
        )
    card = card_of(offer.gpu) if offer.gpu_count else None
    if offer.gpu_count and card is None:
        words = f"the speed of {offer.gpu} is not known"
        return Estimate(
            fits=True, peak_bytes=peak, micro_batch=micro_batch, tokens_per_s=None, train_s=None, basis=words
        )
    micro_steps = train.batch_tokens // (model.context * processes * micro_batch)
    speed = _on_cpu(cpu_cores) if card is None else _on_gpu(card, offer, recipe, micro_steps)
    step_flops = flops_per_token(model, vocab_size) * train.batch_tokens
    computing = (step_flops / speed.flops[1], step_flops / speed.flops[0])
    # Kernels are launched while others run, so the longer of the two is what a step takes.
    step_s = tuple(max(pair) for pair in zip(computing, speed.overhead_s, strict=True))
    steps = train.steps * (1.0 + _evaluation_share(recipe))
    bound = "; launch-bound, so the range is wide" if speed.overhead_s[1] > computing[0] else ""
    return Estimate(
        fits=True,
        peak_bytes=peak,
        micro_batch=micro_batch,
        tokens_per_s=(train.batch_tokens / step_s[1], train.batch_tokens / step_s[0]),
        train_s=(speed.start_s[0] + steps * step_s[0], speed.start_s[1] + steps * step_s[1]),
        basis=f"prior: {speed.words}, 6N+{12 * ATTENTIONS[model.preset]}LCT FLOPs a token{bound}",
    )


def flops_per_token(model: ModelTable, vocab_size: int = 0) -> float:
    """Training FLOPs (forward and backward) for one token."""
    multiplied = parameters_of(model, vocab_size)
    if model.preset == "faithful":  # Its positions are looked up.
        multiplied -= model.context * model.width
    if not model.tied:  # The input embedding is looked up, not multiplied.
        multiplied -= padded_vocab(model, vocab_size) * model.width
    return 6.0 * multiplied + 12.0 * ATTENTIONS[model.preset] * model.layers * model.width * model.context


def peak_bytes(model: ModelTable, micro_batch: int, vocab_size: int = 0, *, bf16: bool = True) -> int:
    """The most memory one GPU holds at once, everything included.

    14 P + B T (36.5 C L + 14 V) was fitted within 1 % to nanoGPT's measured peaks (the modern blocks keep queries and
    keys in fp32, so that 36.5 is 47.5); the chunked loss holds the logits of
    one chunk at a time, and fp32 activations are twice as large. The second peak, at the end of backward, is 20 P:
    weights, AdamW, gradients, DDP's buckets.
    """
    parameters, tokens = parameters_of(model, vocab_size), micro_batch * model.context
    vocab = padded_vocab(model, vocab_size)
    logits = LOGIT_BYTES * min(tokens * vocab, max(CHUNK_LOGITS, vocab))
    activations = ACTIVATION_BYTES[model.preset] * (1 if bf16 else 2) * tokens * model.width * model.layers
    working = max(14 * parameters + activations + logits, 20 * parameters)
    return int(working * FRAGMENTATION) + CONTEXT_BYTES


def fitting_micro_batch(recipe: ResolvedRecipe, offer: Offer, processes: int, vocab_size: int = 0) -> int:
    """The largest micro-batch that fits, is no larger than the recipe's and divides its batch; 0 when there is none."""
    model, train = recipe.tables.model, recipe.tables.train
    sequences, left = divmod(train.batch_tokens, model.context * processes)
    usable = offer.vram_gb * GIB * USABLE_SHARE if offer.gpu_count else float("inf")
    if left:
        return 0
    bf16 = _in_bf16(recipe, offer)
    for size in range(min(train.micro_batch, sequences), 0, -1):
        if sequences % size == 0 and peak_bytes(model, size, vocab_size, bf16=bf16) <= usable:
            return size
    return 0


def _in_bf16(recipe: ResolvedRecipe, offer: Offer) -> bool:
    """Whether the trainer will compute in bf16 there; on a card that is not known it probably will."""
    card = card_of(offer.gpu)
    return recipe.tables.train.precision != "fp32" and bool(offer.gpu_count) and (card is None or card.bf16)


def _on_gpu(card: Card, offer: Offer, recipe: ResolvedRecipe, micro_steps: int) -> _Speed:
    """The whole machine's speed: peak x MFU x GPUs x scaling."""
    scaling = (1.0, 1.0) if offer.gpu_count == 1 else PCIE_SCALING if "PCIe" in offer.gpu else SXM_SCALING
    peak = card.tflops * 1e12 * offer.gpu_count
    launches = micro_steps * recipe.tables.model.layers
    compiled = recipe.tables.train.compile
    return _Speed(
        flops=(peak * card.mfu[0] * scaling[0], peak * card.mfu[1] * scaling[1]),
        overhead_s=(GPU_STEP_S[0] + launches * LAUNCH_S[0], GPU_STEP_S[1] + launches * LAUNCH_S[1]),
        start_s=(START_S[0] + COMPILE_S[0] * compiled, START_S[1] + COMPILE_S[1] * compiled),
        words=f"{offer.gpu_count} x {card.tflops:g} TFLOP/s at {card.mfu[0]:.0%}-{card.mfu[1]:.0%} MFU",
    )


def _on_cpu(cores: int) -> _Speed:
    """A CPU's speed, very roughly."""
    low, high = (each * cores for each in CORE_FLOPS)
    words = f"{cores} CPU cores at {CORE_FLOPS[0] / 1e9:g}-{CORE_FLOPS[1] / 1e9:g} GFLOP/s, very rough"
    return _Speed(flops=(low, high), overhead_s=CPU_STEP_S, start_s=START_S, words=words)


def _evaluation_share(recipe: ResolvedRecipe) -> float:
    """Evaluation as a share of training: a forward pass costs a third of a training pass."""
    evaluated = recipe.tables.eval.tokens / recipe.tables.eval.every
    return evaluated / 3.0 / recipe.tables.train.batch_tokens


def _unfit(peak: int, why: str) -> Estimate:
    return Estimate(fits=False, peak_bytes=peak, micro_batch=0, tokens_per_s=None, train_s=None, basis=why)
