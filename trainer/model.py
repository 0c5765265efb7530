"""Defines the GPT, and the blocks of the `faithful` preset: GPT-2, with losses comparable to nanoGPT's and llm.c's.

Pre-norm blocks, learned positions, GELU in its tanh form, LayerNorm in fp32, one matrix for embedding and head. Tensors
are named as in the published GPT-2 files; linear weights are (out, in) here and (in, out) in those files. The blocks of
the `modern` preset are in modern.py; the head, the loss and the counts are the same for both.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import Refused
from trainer.loss import capped, chunked_cross_entropy
from trainer.modern import ModernBlock, RMSNorm, initialise_modern, rotation
from trainer.recipe import ModelConfig, flops_per_token, padded_vocab

__all__ = ["GPT", "with_vocabulary"]


def with_vocabulary(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """Return the shape with the vocabulary size that the model will have; Refused if the recipe's size is too small."""
    if 0 < config.vocab_size < vocab_size:
        raise Refused(f"model.vocab_size {config.vocab_size} is less than the tokeniser's {vocab_size}")
    return dataclasses.replace(config, vocab_size=padded_vocab(config, vocab_size))


class CausalSelfAttention(nn.Module):
    """Causal self-attention over `heads` heads, by torch's fused kernel.

    On Hopper GPUs, torch 2.11 and newer prefer cuDNN's kernel. Older versions include a cuDNN that torch deliberately
    ranks below flash attention, because it reads past its memory at some widths (pytorch#169849).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x (batch, time, width); each position sees itself and earlier ones."""
        batch, time, width = x.shape
        # (batch, time, 3 width) -> three of (batch, heads, time, width / heads)
        q, k, v = self.c_attn(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, time, width)))


class MLP(nn.Module):
    """Two layers with a hidden layer four times as wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position separately."""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the results of both parts; this residual stream stays in fp32 under autocast."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The whole network; `vocab_size` is the tokeniser's, by default that of `config`.

    Vocabulary rows beyond the tokeniser's ids are padding, which is part of no loss and is never drawn.
    """

    def __init__(self, config: ModelConfig, vocab_size: int | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size or config.vocab_size
        self.config = config = with_vocabulary(config, self.vocab_size)
        modern = config.preset == "modern"
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = None if modern else nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(ModernBlock(config) if modern else Block(config) for _ in range(config.layers))
        self.ln_0 = RMSNorm(config) if modern else None
        self.ln_f = RMSNorm(config) if modern else nn.LayerNorm(config.width, bias=config.bias)
        has_bias = modern and config.bias
        self.lm_head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=has_bias)
        if modern:
            initialise_modern(self, config.init_gain)
        else:
            self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the weights as GPT-2 does: N(0, 0.02), divided by sqrt(2 layers) for projections into the stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    compiled = False
    """Whether training compiles the blocks, and with them the loss."""
    collective_methods = ("hidden", "next_token_logits")
    """The methods besides `forward` that are called from outside: under full sharding these fetch weights too."""

    @property
    def blocks(self) -> list[nn.Module]:
        """Return all blocks; full sharding divides the model into these units."""
        return list(self.h)

    def compile_blocks(self, mode: str = "default") -> None:
        """Compile each block separately, with one kernel for all blocks.

        `torch.compiler.set_stance` marks the code that does not use the kernel. With a single graph for the model, all
        gradients would be ready only at the end of backward, so they could not be sent while backward runs. Compiling
        it would also take several times as long.
        """
        self.compiled = True
        torch._dynamo.config.optimize_ddp = False  # With this optimisation, torch would split each block's graph again.
        for block in self.h:
            block.forward = torch.compile(block.forward, dynamic=False, mode=mode)

    @property
    def head_weight(self) -> Tensor:
        """Return the output matrix (vocab, width)."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    @property
    def head_bias(self) -> Tensor | None:
        """Return the head's bias (vocab), or None."""
        return None if self.lm_head is None else self.lm_head.bias

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the head's input (batch, time, width) for token ids (batch, time)."""
        time = ids.shape[1]
        if self.ln_0 is not None:  # modern: no learned positions, because every block rotates its queries and keys
            x, first, config = self.drop(self.ln_0(self._streamed(self.wte(ids)))), None, self.config
            turned = rotation(time, config.width // config.heads, ids.device, config.rotary, config.rotary_base)
            for block in self.h:
                x, values = block(x, first, *turned)
                first = values if first is None else first
        else:
            assert self.wpe is not None
            x = self.drop(self.wte(ids) + self.wpe(torch.arange(time, device=ids.device)))
            for block in self.h:
                x = block(x)
        return self.ln_f(x)

    def _streamed(self, x: Tensor) -> Tensor:
        """Return x in the residual stream's dtype: bf16 if the recipe says so and products are bf16, else as it is."""
        kind = x.device.type
        in_bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        return x.bfloat16() if in_bf16 and self.config.stream == "bf16" else x

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy (nats per token, fp32) of the next tokens."""
        hidden, config = self.hidden(ids).flatten(0, 1), self.config
        return chunked_cross_entropy(
            hidden, self.head_weight, targets.flatten(), bias=self.head_bias, vocab_size=self.vocab_size,
            softcap=config.softcap, cap_by=config.softcap_by, compiled=self.compiled,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (n, vocab_size), fp32, for the head's input (n, width)."""
        logits = F.linear(hidden.to(self.head_weight.dtype), self.head_weight, self.head_bias)[:, : self.vocab_size]
        return capped(logits.float(), self.config.softcap, self.config.softcap_by)

    def next_token_logits(self, ids: Tensor, last: Tensor) -> Tensor:
        """Return the logits (batch, vocab_size) after position `last` (batch,) of each row of ids (batch, time)."""
        rows = torch.arange(len(ids), device=ids.device)
        return self.logits(self.hidden(ids)[rows, last])

    def flops_per_token(self) -> int:
        """Return the number of flops per token, forward and backward."""
        return flops_per_token(self.config)
