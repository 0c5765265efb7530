"""AdamW as GPT-2 trainers use it, the learning rate of every step, and the arithmetic of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig, Recipe
from trainer.errors import Refused

__all__ = [
    "BatchPlan",
    "decayed",
    "learning_rate",
    "load_optimizer_tensors",
    "make_optimizer",
    "optimizer_tensors",
    "plan_batch",
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
    """Return the rate of step 0, 1, …: linear warm-up that reaches `lr` at its last step, then constant or a cosine.

    The cosine falls from `lr` right after the warm-up to `min_lr` at step `train.steps`, one beyond the last.
    """
    peak, schedule, steps = recipe.optim.lr, recipe.schedule, recipe.train.steps
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant" or step >= steps:
        return peak if schedule.kind == "constant" else schedule.min_lr
    fraction = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    return schedule.min_lr + 0.5 * (1.0 + math.cos(math.pi * fraction)) * (peak - schedule.min_lr)


def decayed(parameter: Tensor) -> bool:
    """Tell whether weight decay acts on it: on matrices and embeddings, not on biases and LayerNorm."""
    return parameter.dim() >= 2


def make_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW in two groups, decayed and not; fused on CUDA, where it saves hundreds of kernel launches."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if decayed(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not decayed(p)], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by parameter name: `h.0.mlp.c_fc.weight.exp_avg` and so on."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give the optimiser its state back, on its own device; raise KeyError where a parameter has none."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    keys = ("step", "exp_avg", "exp_avg_sq")
    state = {index: {key: tensors[f"{name}.{key}"] for key in keys} for index, name in enumerate(ordered)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
