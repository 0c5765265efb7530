"""The optimisers: AdamW as GPT-2 trainers use it, and Muon with AdamW; also the learning rate of every step.

This module also decides whether to skip a step: after an overflow of fp16, or at a spike of the loss or the gradient
norm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed import Processes
from trainer.recipe import OptimConfig, Recipe

__all__ = [
    "LossScale",
    "Muon",
    "MuonAndAdamW",
    "SpikeGuard",
    "decayed",
    "learning_rate",
    "load_optimizer_tensors",
    "make_optimizer",
    "optimizer_tensors",
    "set_learning_rate",
    "set_rates",
]

ALONE = Processes()
STACK_WEIGHTS = 1 << 25
"""The most elements that Muon orthogonalises together: it needs six bytes for each."""
MOMENTUM, FIRST_MOMENTUM = 0.95, 0.85
"""Muon's momentum, and its initial value if it is warmed up."""
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled."""
SMALLEST = 1.0
"""An overflow below this scale means divergence, because a smaller scale does not help."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The state of AdamW and Muon that has its parameter's shape; another optimiser's may have any shape."""
SPIKE_WINDOW = 128
"""The number of steps that are remembered; before there are so many, nothing counts as a spike."""


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 0, 1, …: linear warm-up that reaches `lr` at its last step, then the schedule's kind.

    A cosine falls from `lr`, right after the warm-up, to `min_lr` at step `train.steps`, which is one after the last
    step. A trapezoid stays at `lr` and then falls linearly to `min_lr`. Noam is `lr` times the formula of Vaswani et
    al. 2017, section 5.3.
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
    """Give every parameter group the step's rate times the group's own ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def set_rates(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> float:
    """Set every group's values for step 0, 1, …, including Muon's momentum; return the step's learning rate."""
    rate, warmup = learning_rate(recipe, step), recipe.optim.muon_momentum_warmup
    set_learning_rate(optimizer, rate)
    for group in optimizer.param_groups:
        if warmup and "momentum" in group:
            group["momentum"] = MOMENTUM - (MOMENTUM - FIRST_MOMENTUM) * max(0.0, 1.0 - step / warmup)
    return rate


def decayed(parameter: Tensor) -> bool:
    """Return whether weight decay acts on a parameter: on matrices and embeddings. Others have their own decay."""
    return parameter.dim() >= 2


class Muon(torch.optim.Optimizer):
    """Muon; with the recipe's default options it is the same as torch.optim.Muon.

    Its updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982); with `muon_scale` "aspect", by
    the root of rows over columns instead, as by Muon's author. `cautious` changes the weight decay, and `orthogonal`
    the iterations. Matrices of one shape are orthogonalised together, as a stack; each process orthogonalises some of
    its matrices. A process keeps moments only for the weights that it holds.
    """

    def __init__(self, matrices: Sequence[Tensor], config: OptimConfig, processes: Processes) -> None:
        ratio = config.muon_lr / config.lr if config.muon_lr else 1.0
        decay = config.muon_weight_decay or config.weight_decay
        group = {"params": matrices, "lr_ratio": ratio, "weight_decay": decay, "momentum": MOMENTUM}
        super().__init__([group], {"lr": config.lr})
        self._processes, self._cautious, self._by_aspect = processes, config.cautious, config.muon_scale == "aspect"
        self._polynomials = POLYNOMIALS[config.orthogonal]
        alike: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            alike.setdefault(matrix.shape, []).append(matrix)
        self._stacks: list[list[Tensor]] = []
        for shape, same in alike.items():
            most = max(1, STACK_WEIGHTS // shape.numel())
            self._stacks += [same[first : first + most] for first in range(0, len(same), most)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices, each by its gradient."""
        (group,) = self.param_groups
        for stack in self._stacks:
            for matrix in stack:
                if not self.state[matrix]:
                    self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            weights, gradients = [_own(matrix) for matrix in stack], [_own(matrix.grad) for matrix in stack]
            moments = [_own(self.state[matrix]["momentum_buffer"]) for matrix in stack]
            torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
            # The input has no name here, so that its memory can be used for the output.
            made = orthogonalised(self._share(stack, gradients, moments, group["momentum"]), self._polynomials)
            updates = self._shared(stack, made)
            del made
            kept = 1 - group["lr"] * group["weight_decay"]
            if self._cautious:  # If a step moves a weight away from zero, decay would only undo part of the step.
                towards_zero = torch.stack(weights).mul_(updates) > 0  # One launch for the stack, not one per matrix.
                torch._foreach_mul_(weights, torch.where(towards_zero, kept, 1.0).unbind())
            else:
                torch._foreach_mul_(weights, kept)
            rows, columns = stack[0].shape
            size = math.sqrt(max(1.0, rows / columns)) if self._by_aspect else 0.2 * math.sqrt(max(rows, columns))
            torch._foreach_add_(weights, updates.float().unbind(), alpha=-group["lr"] * size)

    def _share(self, stack: list[Tensor], gradients: list[Tensor], moments: list[Tensor], momentum: float) -> Tensor:
        """Return those whole updates (share, rows, columns), bf16, of the stack that this process orthogonalises.

        Unused places at the end of the last share are zero.
        """
        each = -(-len(stack) // self._processes.count)
        ours = slice(self._processes.rank * each, min((self._processes.rank + 1) * each, len(stack)))
        share = gradients[0].new_zeros((each, *stack[0].shape), dtype=torch.bfloat16)
        # Nesterov's momentum: the gradient is added once more.
        if hasattr(stack[0], "to_local"):
            halves = [torch.empty_like(gradient, dtype=torch.bfloat16) for gradient in gradients]
            torch._foreach_copy_(halves, torch._foreach_lerp(gradients, moments, momentum))
            for number, (matrix, half) in enumerate(zip(stack, halves, strict=True)):
                whole = _whole(half, matrix)  # All processes take part in each gather.
                if ours.start <= number < ours.stop:
                    share[number - ours.start] = whole
        elif gradients[ours]:
            updates = torch._foreach_lerp(gradients[ours], moments[ours], momentum)
            torch._foreach_copy_(list(share[: len(updates)]), updates)
        return share

    def _shared(self, stack: list[Tensor], share: Tensor) -> Tensor:
        """Return this process's part of all updates (stack, rows, columns); each process has made a `share`."""
        rank, count, rows = self._processes.rank, self._processes.count, stack[0].shape[0]
        if count > 1:
            made = share.new_empty((count * len(share), *share.shape[1:]))
            dist.all_gather(list(made.chunk(count)), share.contiguous())
            share = made
        part = -(-rows // count) if hasattr(stack[0], "to_local") else rows
        first = rank * part if part < rows else 0
        return share[: len(stack), first : first + part]


def _own(tensor: Tensor | None) -> Tensor:
    """Return this process's part of a tensor that may be distributed (a DTensor)."""
    assert tensor is not None  # Each matrix has a gradient.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(part: Tensor, like: Tensor) -> Tensor:
    """Gather a tensor from its parts, which are laid out like the parts of `like`, a DTensor."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    laid = DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return laid.full_tensor()


Polynomials = Sequence[tuple[float, float, float]]
POLYNOMIALS: dict[str, Polynomials] = {
    # Jordan et al. 2024, as torch.optim.Muon has it.
    "newton-schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    # The coefficients above trade accuracy for speed; with these, the singular values converge to one, in twelve
    # iterations.
    "newton-schulz-12": ((2.0, -1.5, 0.5),) * 12,
    # Amsel et al. 2025 (arXiv:2505.16932), optimal for each iteration; 2 % smaller, because bf16 rounds.
    "polar-express": (
        (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
"""The coefficients of x, x³ and x⁵ by which each iteration changes every singular value x, by their name in recipes."""


def orthogonalised(x: Tensor, polynomials: Polynomials = POLYNOMIALS["newton-schulz"]) -> Tensor:
    """Return matrices (n, rows, columns), bf16, with the singular vectors of x and singular values near 1.

    x is overwritten. The Newton-Schulz result is bit-identical to torch.optim.Muon's if a product of one matrix is
    bit-identical to that of a stack. This is the case on a CPU from 32 rows and columns on.
    """
    norms = torch.stack(torch._foreach_norm(list(x)))
    x.div_(norms.clamp(min=1e-7).view(-1, 1, 1))
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    for a, b, c in polynomials:
        gram = x @ x.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = torch.baddbmm(x, inner, x, beta=a)
    return x.mT if is_tall else x


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


def block_matrices(model: nn.Module) -> list[Tensor]:
    """Return the matrices that map vectors to vectors: all linear weights except the head's, which maps to tokens."""
    named = model.named_modules()
    return [m.weight for name, m in named if isinstance(m, nn.Linear) and not name.endswith("lm_head")]


def make_optimizer(model: nn.Module, config: OptimConfig, processes: Processes = ALONE) -> torch.optim.Optimizer:
    """Return the optimiser, with a group for each rate and decay. AdamW is fused, which saves hundreds of launches.

    With "muon", Muon gets the matrices inside the blocks, and AdamW the rest. From the same gradient, all processes get
    the same result.
    """
    with_muon = config.kind == "muon"
    matrices = block_matrices(model) if with_muon else []
    taken, alike = {id(matrix) for matrix in matrices}, dict[tuple[float, float], list[Tensor]]()
    own = {
        "wte.weight": (config.embed_lr, config.embed_weight_decay or config.weight_decay),
        "lm_head.weight": (config.head_lr, config.weight_decay),
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in taken:
            usual = (0.0, config.weight_decay) if decayed(parameter) else (config.gain_lr, config.gain_weight_decay)
            alike.setdefault(own.get(name, usual), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "lr_ratio": (rate or config.lr) / config.lr}
        for (rate, decay), parameters in alike.items()
    ]
    betas = (config.beta1, config.beta2)
    adamw = torch.optim.AdamW(groups or [{"params": []}], lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return MuonAndAdamW((Muon(matrices, config, processes), adamw)) if with_muon else adamw


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by parameter and key, as `h.0.mlp.c_fc.weight.exp_avg`; numbers become tensors."""
    return {
        f"{name}.{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the optimiser's state from what `optimizer_tensors` returned, on the device of each parameter.

    Raise KeyError if a parameter has no state, and ValueError if AdamW's or Muon's state has another shape. If there
    are no tensors, because every step before the save was skipped, the optimiser stays as it is.
    """
    if not tensors:
        return
    saved: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        saved.setdefault(name, {})[key] = value
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        on_card = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = saved[names[parameter]]
            for key, value in state.items():
                expected = parameter.shape if key in MOMENTS else () if key == "step" else value.shape
                if value.shape != expected:
                    raise ValueError(f"{names[parameter]}.{key} has the shape {list(value.shape)}")
            # torch needs the step count on the CPU, unless the optimiser's step is a single kernel.
            places = {key: "cpu" if key == "step" and not on_card else parameter.device for key in state}
            optimizer.state[parameter] = {key: value.to(places[key]) for key, value in state.items()}


@dataclass
class LossScale:
    """The factor by which the loss is multiplied before backward: 1 except in fp16, where small gradients would vanish.

    The rule is that of torch.amp.GradScaler, which cannot be used here, because it cannot repeat a step once the
    gradient is unscaled.
    """

    in_use: bool
    value: float = 65536.0
    good_steps: int = 0
    """Steps since the scale last changed."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, to differentiate."""
        return loss * self.value if self.in_use else loss

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale."""
        if self.in_use:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.value)

    def update(self, overflowed: bool) -> bool:
        """Record whether a step overflowed; return False if training has diverged: no scale can help."""
        if not self.in_use:
            return not overflowed
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value /= 2
        elif self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
        return self.value >= SMALLEST

    def as_record(self) -> dict[str, float] | None:
        """Return the state for a checkpoint; None if no scale is used."""
        return {"value": self.value, "good_steps": self.good_steps} if self.in_use else None

    def restore(self, record: dict[str, float] | None) -> None:
        """Restore the state of a checkpoint; None, from a run without fp16, changes nothing."""
        if self.in_use and record is not None:
            self.value, self.good_steps = float(record["value"]), int(record["good_steps"])


class SpikeGuard:
    """Detects a spike of the loss or the gradient norm by its z-score among the last steps, like llm.c.

    Spikes are remembered too, so a new level counts as a spike only until most of the remembered steps have it.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=SPIKE_WINDOW) for name in ("loss", "gradient norm")}

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Return what jumped, as the beginning of a sentence, or None; the values are not remembered yet."""
        for (name, window), value in zip(self._seen.items(), (loss, grad_norm), strict=True):
            if len(window) < SPIKE_WINDOW:
                continue
            mean = math.fsum(window) / SPIKE_WINDOW
            spread = math.sqrt(math.fsum((past - mean) ** 2 for past in window) / SPIKE_WINDOW)
            # If the values hardly differ, their spread is too small to judge by.
            spread = max(spread, 1e-3 * abs(mean), 1e-12)
            score = (value - mean) / spread
            if score > self._threshold:
                above = f"{score:.1f} standard deviations above the last {SPIKE_WINDOW} steps' mean"
                return f"the {name} {value:.4g} is {above}"
        return None

    def remember(self, loss: float, grad_norm: float) -> None:
        """Remember one step's values, except those that are not finite, as the norm after an overflow of fp16."""
        for window, value in zip(self._seen.values(), (loss, grad_norm), strict=True):
            if math.isfinite(value):
                window.append(value)

    def as_record(self) -> dict[str, list[float]]:
        """Return the remembered values for a checkpoint, so that a resumed run judges in the same way."""
        return {name: list(window) for name, window in self._seen.items()}

    def restore(self, record: dict[str, Any]) -> None:
        """Restore the remembered values of a checkpoint."""
        for name, window in self._seen.items():
            window.clear()
            window.extend(float(value) for value in record[name])
