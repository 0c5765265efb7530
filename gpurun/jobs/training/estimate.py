"""Estimates whether a recipe fits on an offer, how fast it trains and how long it takes, before anything is rented.

Memory is estimated in memory.py. Speed is a range, because it is estimated from published figures or from earlier runs;
`Estimate.basis` names the source. The expected MFU (the used share of the GPUs' peak FLOP/s) of the trainer's own loop
is 55 % on eight A100 SXM, 38 % on eight H100 SXM and 43 % on one H200, for these reasons:

- A100: llm.c trains GPT-2 124M on 9.9 billion tokens in 94 minutes, which is 60 % MFU (its discussion 481). Its README
  measures PyTorch as 7 % slower: 56 %, or 321 ms a step.
- H100: plain PyTorch takes 148 ms a step, which is 38 % (modded-nanogpt's track 3).
- H200: our loop is 0.98x to 1.00x as fast as nanoGPT, both compiled, at 43 to 45 % (docs/dev/BENCHMARKS.md).

FLOPs per token are 6 N + 12 L C T, where N is the number of parameters used in matrix products (all except the
positions; a tied head counts once), L the number of layers, C the width and T the context. As in nanoGPT and the PaLM
paper, the saving of a causal mask is not subtracted. A layer of an encoder-decoder has three attentions, hence 36 L C
T; every sentence counts as a whole context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpurun.core.installed_files import recipe as schema
from gpurun.core.records import Offer
from gpurun.core.run_plan import Estimate
from gpurun.jobs.training.history import Nearest, Priors, nearest_run
from gpurun.jobs.training.memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    count_weight_shards,
    fitting_micro_batch,
    peak_on,
    what_would_fit,
)
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.providers.catalog import GpuModel, card_of

NO_PRIORS = Priors()

CORE_FLOPS = (5e9, 60e9)
CPU_STEP_S = (0.003, 0.05)  # The overhead of one optimiser step on a CPU, whatever the model.
GPU_STEP_S = (0.001, 0.005)  # The overhead of one optimiser step on a GPU.
START_S = (7.0, 40.0)  # Importing torch, opening the data, and the first step.
COMPILE_S = (8.0, 60.0)  # 8 s was measured with 16 cores, on one H200.
# The speed without compiling, relative to compiled: nanoGPT's README measures 250 ms eager and 135 ms compiled.
EAGER_SHARE = (0.45, 0.75)
NODES_SCALING = (0.7, 0.95)
"""The share of its speed that each node keeps when several train together. It is assumed: the network is unknown."""
PCIE_SCALING = (0.85, 0.97)  # NVLink needs no factor, because its MFU was measured on whole machines with eight GPUs.
HELLASWAG_ITEM_TOKENS = 4 * 128
"""Guessed: an item has four endings, each in a row with its context, padded to the longest row of a few items."""
CORE_TASKS, CORE_ITEM_TOKENS = 22, 1_500
"""The number of tasks, and a guess of the tokens per item: most rows begin with ten examples."""
LAUNCH_S = (0.0002, 0.0015)
"""Seconds to launch the kernels of one layer, forward and backward, without a compiler: least and most."""
FORWARD_SHARE = 1 / 3
"""The share of a training step's time that its forward pass takes."""
_MUON_MATRICES = {"faithful": (12, 4), "modern": (12, 6), "encoder-decoder": (28, 16)}
"""Per layer: the number of weights in its matrices, divided by the square of the width; and the number of matrices."""


@dataclass(frozen=True)
class Pieces:
    """The work of a run: its steps, and how often and on how many tokens it evaluates, saves and samples."""

    steps: int
    batch_tokens: int
    eval_every: int
    eval_tokens: int
    checkpoint_every: int
    sampled_tokens: int = 0
    """Tokens that the model processes for one checkpoint's samples: a whole context for each token of each prompt."""
    sampled_layers: int = 0
    """Layers launched for the samples of one checkpoint: all prompts together, but one token after another."""
    core_tokens: int = 0
    """Tokens that the model processes for CORE, after the last step."""

    @classmethod
    def from_recipe(cls, resolved: Mapping[str, Any]) -> Pieces | None:
        """Return the work that the tables of a recipe.json describe; None if a figure is missing."""
        train, evaluation = resolved.get("train", {}), resolved.get("eval", {})
        found = {
            "steps": train.get("steps"),
            "batch_tokens": train.get("batch_tokens"),
            "eval_every": evaluation.get("every"),
            "eval_tokens": evaluation.get("tokens"),
            "checkpoint_every": train.get("checkpoint_every"),
        }
        if not all(type(number) is int and number > 0 for number in found.values()):
            return None
        sample, model = resolved.get("sample", {}), resolved.get("model", {})
        prompts, tokens = len(sample.get("prompts", ())), sample.get("tokens", 0)
        items = evaluation.get("hellaswag_items", 0)
        if type(items) is int and items > 0:
            found["eval_tokens"] += HELLASWAG_ITEM_TOKENS * items
        return cls(
            **found,
            sampled_tokens=prompts * tokens * model.get("context", 0),
            sampled_layers=tokens * model.get("layers", 0) if prompts else 0,
            core_tokens=core_tokens(resolved),
        )

    @property
    def sampled_steps(self) -> float:
        """Return the work of one checkpoint's samples, in steps.

        With few rows, a token takes twice as long as in training.
        """
        return self.sampled_tokens / 2.0 / self.batch_tokens

    def saves_from(self, step: int) -> int:
        """Return how many checkpoints are due from this step on, including the final one."""
        return self._count_multiples(self.checkpoint_every, step) + 1

    def evaluations_from(self, step: int) -> int:
        """Return how many evaluations are due from this step on, including one for each checkpoint."""
        every, saved = self.eval_every, self.checkpoint_every
        both = self._count_multiples(math.lcm(every, saved), step)
        return self._count_multiples(every, step) + self._count_multiples(saved, step) - both + 1

    def beside_from(self, step: int) -> float:
        """Return the work of all evaluations and samples from this step on, in steps."""
        evaluated_tokens = self.evaluations_from(step) * self.eval_tokens + self.core_tokens
        evaluated = evaluated_tokens * FORWARD_SHARE / self.batch_tokens
        return evaluated + self.saves_from(step) * self.sampled_steps

    def launching_s(self, step: int) -> tuple[float, float]:
        """Return the (least, most) seconds to launch all samples from this step on; they are never compiled."""
        layers = self.saves_from(step) * self.sampled_layers
        return layers * LAUNCH_S[0] * FORWARD_SHARE, layers * LAUNCH_S[1] * FORWARD_SHARE

    def _count_multiples(self, every: int, step: int) -> int:
        """Return how many steps, from this step on and before the last, are multiples of `every`."""
        return max(0, (self.steps - 1) // every - (max(1, step) - 1) // every)


def core_tokens(resolved: Mapping[str, Any]) -> int:
    """Return the tokens that CORE needs, from a recipe.json; 0 for an older recipe.json, which lacks the key."""
    most = resolved.get("eval", {}).get("core", 0)
    return CORE_TASKS * most * CORE_ITEM_TOKENS if type(most) is int and most > 0 else 0


@dataclass(frozen=True)
class _Speed:
    """The speed of a whole machine. Each pair is (low, high).

    `flops` is in FLOP/s, `overhead_s` in seconds per step, `beside_s` in seconds outside of the steps. `expected_flops`
    is the most likely FLOP/s, None if unknown.
    """

    flops: tuple[float, float]
    expected_flops: float | None
    overhead_s: tuple[float, float]
    beside_s: tuple[float, float]
    words: str


def estimate(
    recipe: ResolvedRecipe,
    offer: Offer,
    *,
    vocab_size: int = 0,
    cpu_cores: int = 2,
    priors: Priors = NO_PRIORS,
    machine: str = "",
) -> Estimate:
    """Return the estimate of a recipe on an offer. `vocab_size` is the tokeniser's, used if the recipe sets none.

    `train_s` runs from the trainer's start to its end: start, compilation, steps, evaluations, samples. If the batch
    cannot be divided among the offer's GPUs, or if one sequence does not fit, `fits` is False and there is no time. The
    user's own earlier runs (`priors`) take precedence over published figures; `machine` identifies this computer's CPU.
    """
    model, train = recipe.tables.model, recipe.tables.train
    processes = offer.gpu_count or max(recipe.processes, offer.nodes)
    card = card_of(offer.gpu) if offer.gpu_count else None
    micro_batch = fitting_micro_batch(recipe, offer, processes, vocab_size)
    peak = peak_on(recipe, offer, processes, max(1, micro_batch), vocab_size)
    if train.loop == "huggingface" and processes > 1:
        return _unfitting_estimate(
            "processes", peak, f'train.loop "huggingface" trains in one process, but there are {processes} GPUs'
        )
    if train.batch_tokens % (model.context * processes):
        sequences = f"sequences of {model.context}"
        why = f"{train.batch_tokens} tokens a step cannot be divided among {processes} processes in {sequences}"
        return _unfitting_estimate("batch", peak, why)
    if not micro_batch:
        return _unfitting_estimate("memory", peak, what_would_fit(recipe, offer, processes, vocab_size))
    if card is not None and (why := _wrong_precision(recipe, card)):
        return _unfitting_estimate("precision", peak, why)
    token_flops = recipe.flops_per_token(vocab_size)
    own = nearest_run(priors, recipe, offer, micro_batch, token_flops, machine)
    if own is not None:
        guess = _estimate_by_own_run(own, recipe, peak, micro_batch)
    elif offer.gpu_count and card is None:
        words = "speed unknown: needs --hours"
        guess = _unfitting_estimate("speed", peak, words).model_copy(update={"fits": True, "micro_batch": micro_batch})
    else:
        micro_steps = train.batch_tokens // (model.context * processes * micro_batch)
        speed = _cpu_speed(cpu_cores) if card is None else _gpu_speed(card, offer, recipe, micro_steps)
        speed = _scale_to_nodes(speed, offer.nodes, is_counted=bool(offer.gpu_count))
        guess = _estimate_by_speed(speed, recipe, peak, micro_batch, token_flops)
    if count_weight_shards(recipe, offer, processes, vocab_size) == 1:
        return guess
    return guess.model_copy(update={"sharded": True, "basis": f"{guess.basis}; weights sharded (FSDP)"})


def _estimate_by_speed(
    speed: _Speed, recipe: ResolvedRecipe, peak: int, micro_batch: int, token_flops: float
) -> Estimate:
    """Return the estimate that follows from a machine's speed."""
    train = recipe.tables.train
    step_flops = token_flops * train.batch_tokens + muon_flops(recipe)
    computing = (step_flops / speed.flops[1], step_flops / speed.flops[0])
    # Kernels are launched while others run, so a step takes the longer of the two times.
    step_s = tuple(max(pair) for pair in zip(computing, speed.overhead_s, strict=True))
    steps = steps_of_work(recipe)
    launch_bound = speed.overhead_s[1] > computing[0]
    expected_s = None
    if speed.expected_flops is not None and not launch_bound:
        expected_s = sum(speed.beside_s) / 2 + steps * step_flops / speed.expected_flops
    own = f"6N+{12 * schema.ATTENTIONS[recipe.tables.model.preset]}LCT"
    notes = [f"{'your flops_per_token' if recipe.reader else own} FLOPs a token"]
    if launch_bound:
        notes.append("launch-bound, so the range is wide")
    return Estimate(
        fits=True,
        peak_bytes=peak,
        micro_batch=micro_batch,
        tokens_per_s=(train.batch_tokens / step_s[1], train.batch_tokens / step_s[0]),
        train_s=(speed.beside_s[0] + steps * step_s[0], speed.beside_s[1] + steps * step_s[1]),
        basis=f"prior: {speed.words}, {'; '.join(notes)}",
        expected_s=expected_s,
    )


def muon_flops(recipe: ResolvedRecipe) -> int:
    """Return the FLOPs, over all processes, to orthogonalise one step's updates under Muon; 0 under AdamW.

    Each of the five or twelve iterations costs 4 k C^3 + 2 C^3 on a matrix of shape (C, k C).
    """
    model = recipe.tables.model
    squares, matrices = _MUON_MATRICES[model.preset]
    iterations = 12 if recipe.tables.optim.orthogonal == "newton-schulz-12" else 5
    each = iterations * (4 * squares + 2 * matrices) * model.width**3
    return model.layers * each if recipe.tables.optim.kind == "muon" else 0


def _estimate_by_own_run(own: Nearest, recipe: ResolvedRecipe, peak: int, micro_batch: int) -> Estimate:
    """Return the estimate that follows from one of the user's earlier runs."""
    train, prior = recipe.tables.train, own.prior
    low, high = own.tokens_per_s * (1 - min(0.8, own.spread)), own.tokens_per_s * (1 + own.spread)
    steps = steps_of_work(recipe)
    times = [steps * train.batch_tokens / each for each in (high, low)]
    start = (0.8 * prior.start_s, 1.2 * prior.start_s)
    sampling_s = _pieces(recipe).launching_s(recipe.first_step + 1) if prior.gpu_count else (0.0, 0.0)
    words = f"from your run {prior.run}: {prior.tokens_per_s:,.0f} tok/s measured"
    if not own.is_same:
        words += f" with a similar model, batch or machine, hence {own.tokens_per_s:,.0f} here"
    measured = int((prior.memory_peak_bytes or 0) * FRAGMENTATION) + CONTEXT_BYTES
    return Estimate(
        fits=True,
        peak_bytes=max(peak, measured) if own.is_same and prior.gpu_count else peak,
        micro_batch=micro_batch,
        tokens_per_s=(low, high),
        train_s=(start[0] + times[0] + sampling_s[0], start[1] + times[1] + sampling_s[1]),
        basis=words,
        expected_s=prior.start_s + steps * train.batch_tokens / own.tokens_per_s + sum(sampling_s) / 2,
    )


def _gpu_speed(card: GpuModel, offer: Offer, recipe: ResolvedRecipe, micro_steps: int) -> _Speed:
    """Return the speed of a whole machine: peak FLOP/s x MFU x number of GPUs x scaling."""
    scaling = PCIE_SCALING if offer.gpu_count > 1 and not card.nvlink else (1.0, 1.0)
    half = recipe.tables.train.precision != "fp32"
    tflops = card.tflops if half else card.fp32_tflops
    peak = tflops * 1e12 * offer.gpu_count
    in_fp16 = " in fp16" if half and not card.bf16 else ""
    launches = micro_steps * recipe.tables.model.layers
    compiled = recipe.tables.train.compile
    published = card.expected_mfu if half and compiled else None
    sampling_s = _pieces(recipe).launching_s(recipe.first_step + 1)
    low, high = (mfu * share for mfu, share in zip(card.mfu, (1.0, 1.0) if compiled else EAGER_SHARE, strict=True))
    return _Speed(
        flops=(peak * low * scaling[0], peak * high * scaling[1]),
        expected_flops=None if published is None else peak * published * sum(scaling) / 2,
        overhead_s=(GPU_STEP_S[0] + launches * LAUNCH_S[0], GPU_STEP_S[1] + launches * LAUNCH_S[1]),
        beside_s=(
            START_S[0] + COMPILE_S[0] * compiled + sampling_s[0],
            START_S[1] + COMPILE_S[1] * compiled + sampling_s[1],
        ),
        words=f"{offer.gpu_count} x {tflops:g} TFLOP/s{in_fp16} at {low:.0%}-{high:.0%} MFU"
        + ("" if compiled else " without torch.compile")
        + (f", {published:.0%} expected ({card.rests_on})" if published is not None else ""),
    )


def _cpu_speed(cores: int) -> _Speed:
    """Return a very rough speed of a CPU."""
    low, high = (each * cores for each in CORE_FLOPS)
    words = f"{cores} CPU cores at {CORE_FLOPS[0] / 1e9:g}-{CORE_FLOPS[1] / 1e9:g} GFLOP/s, very rough"
    return _Speed(flops=(low, high), expected_flops=None, overhead_s=CPU_STEP_S, beside_s=START_S, words=words)


def _scale_to_nodes(speed: _Speed, nodes: int, *, is_counted: bool) -> _Speed:
    """Return the speed of several nodes together. `is_counted` means that `speed` already includes all nodes' GPUs."""
    if nodes == 1:
        return speed
    low, high = (each * (1 if is_counted else nodes) for each in NODES_SCALING)
    expected = speed.expected_flops
    return replace(
        speed,
        flops=(speed.flops[0] * low, speed.flops[1] * high),
        expected_flops=None if expected is None else expected * (low + high) / 2,
        words=f"{speed.words}, {NODES_SCALING[0]:.0%}-{NODES_SCALING[1]:.0%} of that on {nodes} nodes (assumed)",
    )


def _wrong_precision(recipe: ResolvedRecipe, card: GpuModel) -> str:
    """Return why the trainer would refuse the recipe's precision on this GPU; "" if it would not refuse it."""
    train = recipe.tables.train
    if not card.bf16 and train.precision == "bf16":
        return f'{card.name} has no bf16; train.precision "auto" would run in fp16'
    if not card.bf16 and train.precision == "auto" and train.loop == "huggingface":
        return f'{card.name} computes in fp16, which train.loop "huggingface" cannot; train.precision "fp32" would run'
    return ""


def steps_of_work(recipe: ResolvedRecipe) -> float:
    """Return the remaining work in steps; evaluations and samples are converted to steps."""
    return recipe.steps_left + _pieces(recipe).beside_from(recipe.first_step + 1)


def _pieces(recipe: ResolvedRecipe) -> Pieces:
    pieces = Pieces.from_recipe(recipe.record)
    assert pieces is not None
    return pieces


def _unfitting_estimate(obstacle: str, peak: int, why: str) -> Estimate:
    """Return the estimate of an offer on which the recipe does not fit."""
    return Estimate(
        fits=False, peak_bytes=peak, micro_batch=0, tokens_per_s=None, train_s=None, basis=why, obstacle=obstacle
    )
