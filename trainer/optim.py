"""AdamW as GPT-2 trainers use it, Muon beside it, the learning rate of every step, and the arithmetic of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import Refused
from trainer.recipe import OptimConfig, Recipe

__all__ = [
    "BatchPlan",
    "MuonAndAdamW",
    "decayed",
    "learning_rate",
    "load_optimizer_tensors",
    "make_optimizer",
    "optimizer_tensors",
    "plan_batch",
    "set_learning_rate",
]


@dataclass(frozen=True)
class BatchPlan:
    """How the sequences of one optimiser step are cut: sequences = micro_batch x processes x accumulation."""

    sequences: int
    micro_batch: int
    accumulation: int


def plan_batch(recipe: Recipe, processes: int) -> BatchPlan:
    """Return the plan with the largest micro-batch that the recipe allows; refuse when none is whole."""
    tokens, context, most = recipe.train.batch_tokens, recipe.model.context, recipe.train.micro_batch
    if tokens % context:
        raise Refused(f"train.batch_tokens {tokens} is not a multiple of model.context {context}")
    sequences = tokens // context
    if sequences % processes:
        raise Refused(f"a step of {sequences} sequences cannot be shared equally by {processes} processes")
    each = sequences // processes
    micro_batch = next(size for size in range(min(most, each), 0, -1) if each % size == 0)
    return BatchPlan(sequences, micro_batch, each // micro_batch)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 0, 1, …: linear warm-up that reaches `lr` at its last step, then what the kind says.

    A cosine falls from `lr` right after the warm-up to `min_lr` at step `train.steps`, one beyond the last; a trapezoid
    stays and then falls there in a straight line. Noam is `lr` times the formula of Vaswani et al. 2017, section 5.3.
    """
    peak, schedule, steps = recipe.optim.lr, recipe.schedule, recipe.train.steps
    if schedule.kind == "noam":
        number = step + 1
        return float(peak * recipe.model.width**-0.5 * min(number**-0.5, number * schedule.warmup_steps**-1.5))
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant" or step >= steps:
        return peak if schedule.kind == "constant" else schedule.min_lr
    if schedule.kind == "trapezoid":
        share = min(1.0, (steps - step) / max(1, schedule.cooldown_steps(steps)))
        return schedule.min_lr + share * (peak - schedule.min_lr)
    fraction = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    return schedule.min_lr + 0.5 * (1.0 + math.cos(math.pi * fraction)) * (peak - schedule.min_lr)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of parameters the step's rate times the group's own ratio to it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def decayed(parameter: Tensor) -> bool:
    """Tell whether weight decay acts on it: on matrices and embeddings, not on biases and LayerNorm."""
    return parameter.dim() >= 2


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimisers that a loop uses as one: they share its groups and its state, and step one after the other."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = tuple(parts)
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move all weights."""
        assert closure is None
        for part in self._parts:
            part.step()


def _block_matrices(model: nn.Module) -> list[Tensor]:
    """Return the matrices that map vectors to vectors; embeddings and the head, which map tokens, are none of them."""
    named = model.named_modules()
    return [m.weight for name, m in named if isinstance(m, nn.Linear) and not name.endswith("lm_head")]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimiser, its groups decayed or not; AdamW is fused: hundreds of launches fewer, also on a CPU.

    Under "muon" the matrices inside the blocks are Muon's. Every process makes the same of the same gradient.
    """
    with_muon = config.kind == "muon"
    matrices = _block_matrices(model) if with_muon else []
    taken = {id(matrix) for matrix in matrices}
    parameters = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in parameters if decayed(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not decayed(p)], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return MuonAndAdamW((_make_muon(matrices, config), adamw)) if with_muon else adamw


def _make_muon(matrices: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    """Return torch's Muon, whose updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982)."""
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise Refused(f'optim.kind is "muon", which needs torch 2.9 or newer; here is {torch.__version__}')
    group = {"params": matrices, "lr_ratio": config.muon_lr / config.lr if config.muon_lr else 1.0}
    made: torch.optim.Optimizer = muon(
        [group], lr=config.lr, weight_decay=config.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return made


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by parameter name: `h.0.mlp.c_fc.weight.exp_avg` and so on."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give the optimiser its state back, on its own device; KeyError where a parameter has none, ValueError where it
    is of another shape.

    One that had never moved when it was saved, since every step so far was skipped, has no tensors at all: it is fresh.
    """
    if not tensors:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        keys = ("momentum_buffer",) if "ns_steps" in group else ("step", "exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            state: dict[str, Any] = {key: tensors[f"{names[parameter]}.{key}"] for key in keys}
            for key, value in state.items():
                if value.shape != (parameter.shape if key != "step" else ()):
                    raise ValueError(f"{names[parameter]}.{key} has the shape {list(value.shape)}")
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
