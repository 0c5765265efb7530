"""A GPT-2 and its training loop as nanoGPT describes them, written anew: what the trainer is held against.

Random windows of a memory-mapped file, the whole (tokens, vocabulary) logits into torch's cross-entropy, AdamW. Tensors
are named as in the trainer's model, so that weights can be copied. GELU is the tanh form, as GPT-2's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADER_BYTES = 1024


@dataclass(frozen=True)
class Shape:
    """What a model and a batch are like."""

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    batch: int
    bias: bool


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.c_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, time, width))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(shape.width, 4 * shape.width, bias=shape.bias),
            "c_proj": nn.Linear(4 * shape.width, shape.width, bias=shape.bias),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with a tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, bias=shape.bias)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = math.sqrt(2 * shape.layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / small)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def plain_adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


class PlainLoop:
    """The loop: a batch of random windows, forward, backward, clip, step; the loss is read every tenth step."""

    def __init__(self, shape: Shape, file: Path, rate: float, *, is_compiled: bool = False) -> None:
        self.shape, self.file, self.rate = shape, file, rate
        self.model = PlainGPT(shape)
        self.forward = torch.compile(self.model) if is_compiled else self.model
        self.optimizer = plain_adamw(self.model, rate)
        self.taken = 0
        self.logged = math.nan

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch, context); the map is opened anew, or its pages would count as this process's."""
        row, context = np.memmap(self.file, dtype=np.uint16, mode="r", offset=HEADER_BYTES), self.shape.context
        starts = torch.randint(len(row) - context, (self.shape.batch,)).tolist()
        ids = torch.stack([torch.from_numpy(row[start : start + context].astype(np.int64)) for start in starts])
        ends = torch.stack(
            [torch.from_numpy(row[start + 1 : start + 1 + context].astype(np.int64)) for start in starts]
        )
        return ids, ends

    def take(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Take one step and return its loss."""
        ids, targets = self.random_batch() if batch is None else batch
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        loss = self.forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1
        if self.taken % 10 == 0:
            self.logged = loss.item()
        return loss.detach()
