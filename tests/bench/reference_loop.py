"""A GPT-2 and its training loop as nanoGPT describes them, written again, as a rival for the trainer.

Random windows of a memory-mapped file, the whole (tokens, vocabulary) logits into torch's cross-entropy, AdamW. The
tensors have the names of the trainer's model, so that weights can be copied. GELU is the exact function, as in nanoGPT.
GPT-2 itself, and so the trainer, uses the tanh approximation, which costs more on a CPU and changes no loss by as much
as 0.001.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADER_BYTES = 1024


def card_clock() -> float:
    """Wait until the GPU has finished its work, then return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batch."""

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    batch: int
    bias: bool


class Attention(nn.Module):
    """Causal attention by torch's own function."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.c_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        return self.c_proj(self.attend(q, k, v).transpose(1, 2).contiguous().view(batch, time, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output of each position: (batch, heads, time, width of a head)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class SlowAttention(Attention):
    """Causal attention with the whole (time, time) matrix, step by step, as first lessons write it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        ahead = torch.triu(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device), diagonal=1)
        return scores.masked_fill(ahead, -math.inf).softmax(dim=-1) @ v


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: type[Attention]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attn = attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(shape.width, 4 * shape.width, bias=shape.bias),
            "c_proj": nn.Linear(4 * shape.width, shape.width, bias=shape.bias),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class PlainGPT(nn.Module):
    """GPT-2 with a tied head."""

    def __init__(self, shape: Shape, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
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


def plain_adamw(model: nn.Module, rate: float, *, fused: bool | None = None) -> torch.optim.AdamW:
    """Return an AdamW that decays matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


class PlainLoop:
    """A training loop: a batch of random windows, forward, backward, clip, step; the loss is read every tenth step.

    On a GPU it does what nanoGPT does there: pinned batches and the fused AdamW.
    """

    attention: type[Attention] = Attention

    def __init__(
        self, shape: Shape, file: Path, rate: float, *, is_compiled: bool = False, precision: str = "fp32"
    ) -> None:
        self.shape, self.file, self.rate = shape, file, rate
        self.on_card = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_card else "cpu")
        self.is_half = precision == "bf16"
        self.model = PlainGPT(shape, self.attention).to(self.device)
        self.forward = torch.compile(self.model) if is_compiled else self.model
        self.optimizer = self.adamw()
        self.taken = 0
        self.logged = math.nan

    def adamw(self) -> torch.optim.AdamW:
        """Return the optimiser, fused on a GPU, as nanoGPT uses it."""
        return plain_adamw(self.model, self.rate, fused=True if self.on_card else None)

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (batch, context); the map is reopened so that its pages do not count as memory."""
        row, context = np.memmap(self.file, dtype=np.uint16, mode="r", offset=HEADER_BYTES), self.shape.context
        starts = torch.randint(len(row) - context, (self.shape.batch,)).tolist()
        ids = torch.stack([torch.from_numpy(row[start : start + context].astype(np.int64)) for start in starts])
        ends = torch.stack(
            [torch.from_numpy(row[start + 1 : start + 1 + context].astype(np.int64)) for start in starts]
        )
        return (ids.pin_memory(), ends.pin_memory()) if self.on_card else (ids, ends)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.is_half else contextlib.nullcontext()

    def take(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Take one step and return its loss."""
        ids, targets = (part.to(self.device, non_blocking=True) for part in batch or self.random_batch())
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        with self.autocast():
            loss = self.forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1
        if self.taken % 10 == 0:
            self.logged = loss.item()
        return loss.detach()


class SlowLoop(PlainLoop):
    """The slow way of many first posts: Python makes rows token by token, no flash attention, no 16 bits, no TF32.

    Its loss is read at every step, and its AdamW updates one weight tensor at a time.
    """

    attention = SlowAttention

    def adamw(self) -> torch.optim.AdamW:
        """Return torch's default AdamW, except that it updates the weights one by one."""
        return torch.optim.AdamW(plain_adamw(self.model, self.rate).param_groups, foreach=False)

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (batch, context), made through lists of Python's integers."""
        row, context = np.memmap(self.file, dtype=np.uint16, mode="r", offset=HEADER_BYTES), self.shape.context
        ids, targets = [], []
        for _ in range(self.shape.batch):
            start = int(torch.randint(len(row) - context, (1,)))
            ids.append([int(row[place]) for place in range(start, start + context)])
            targets.append([int(row[place]) for place in range(start + 1, start + 1 + context)])
        return torch.tensor(ids), torch.tensor(targets)

    def take(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Take one step in full fp32, and wait for its loss."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            loss = super().take(batch)
            loss.item()
        finally:
            torch.set_float32_matmul_precision(before)
        return loss
