"""Counts the kernels that a step of Muon launches on a GPU: `python tests/bench/count_muon.py`, for a Markdown table.

Ours is the optimiser of recipes/modern-124m.toml; 355M has the same keys with more and wider layers.

The count comes from the operations on tensors without data: each that is not a view is a launch, and an operation on a
list of tensors is as many launches as torch splits it into (at most 320 blocks of 65,536 elements and 48 tensors each).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed import Processes
from trainer.model import GPT
from trainer.optim import Muon, block_matrices
from trainer.recipe_file import read_recipe

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "modern-124m.toml"
SHAPES = {"124M": {}, "355M": {"layers": 24, "heads": 8, "width": 1024}}


class _Launches(TorchDispatchMode):
    """A dispatch mode that counts the kernels that operations would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "_foreach_" in str(func):
            tensors: list[Tensor] = args[0]
            blocks = sum(-(-tensor.numel() // 65_536) for tensor in tensors)
            self.count += max(-(-blocks // 320), -(-len(tensors) // 48))
        elif not func.is_view and "empty" not in str(func):
            self.count += 1
        return made


def launches(shape: str, whose: str) -> int:
    """Return the launches of one step of our Muon (`ours`) or torch's (`torch`) on the matrices of a `modern` model."""
    recipe = read_recipe(RECIPE)
    with torch.device("meta"):
        matrices = block_matrices(GPT(replace(recipe.model, **SHAPES[shape]), 50257))
    optimizer: torch.optim.Optimizer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
    if whose == "ours":
        optimizer = Muon(matrices, recipe.optim, Processes())
    for matrix in matrices:
        matrix.grad = torch.empty_like(matrix)
    optimizer.step()  # The first step makes the moments.
    with _Launches() as seen:
        optimizer.step()
    return seen.count


if __name__ == "__main__":
    print("| Muon, launches a step | torch's | ours |\n| --- | --- | --- |")
    for name in SHAPES:
        print(f"| {name} | {launches(name, 'torch'):,} | {launches(name, 'ours'):,} |")
