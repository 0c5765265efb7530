"""Defines the blocks of the `modern` preset: proven improvements since GPT-2 that need only stock torch.

Rotary positions (RoPE, Su et al. 2021, arXiv:2104.09864), queries and keys of unit length (QK-norm), ReLU squared (So
et al. 2021, arXiv:2109.08668), RMSNorm, a separate head. Layers that write into the residual stream or produce the
logits start at zero, so that the network starts as its embedding alone. Optional, by keys of the recipe: biases,
`gains` of the norms, and values that are a learned mixture with the first layer's (`value_mix`: Zhou et al. 2024,
arXiv:2410.17897).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.recipe import ModelConfig

__all__ = ["ModernBlock", "RMSNorm", "initialise_modern", "rms_norm", "rotation"]

EMBEDDING_STD = 0.02


def rms_norm(x: Tensor, gains: Tensor | None = None, *, in_bf16: bool = False) -> Tensor:
    """Scale x (…, width) to a mean square of one, then multiply by `gains` (width), if given.

    The result is computed in fp32, even under autocast or for a bf16 x. With `in_bf16`, a bf16 x stays in bf16, with
    fp32's epsilon.
    """
    if not in_bf16 or x.dtype != torch.bfloat16:
        return F.rms_norm(x.float(), x.shape[-1:], gains)
    with torch.autocast(x.device.type, enabled=False):
        gains = None if gains is None else gains.to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], gains, torch.finfo(torch.float32).eps)


class RMSNorm(nn.Module):
    """Divides each vector by its root mean square; if the recipe has gains, multiplies each channel by its gain."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.in_bf16 = config.stream == "bf16"
        self.weight = nn.Parameter(torch.ones(config.width)) if config.gains else None

    def forward(self, x: Tensor) -> Tensor:
        """Scale x (…, width) to a mean square of one, then multiply by the gains."""
        return rms_norm(x, self.weight, in_bf16=self.in_bf16)


def rotation(
    time: int, channels: int, device: torch.device, share: float = 1.0, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (time, channels / 2), fp32, of the angles by which a head's channels rotate.

    Only a `share` of the channels rotates; the other channels do not depend on the position. The slowest pair of
    channels rotates once in about 2 pi `base` positions.
    """
    turned = max(2, 2 * round(share * channels / 2))
    frequencies = base ** -(torch.arange(0, turned, 2, device=device, dtype=torch.float32) / turned)
    frequencies = F.pad(frequencies, (0, (channels - turned) // 2))
    angles = torch.arange(time, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate channel i of x (…, time, channels) together with channel i + channels / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class ModernAttention(nn.Module):
    """Causal self-attention; its scores are cosines of rotated queries and keys, times channels x `attention_scale`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.scale, self.in_bf16 = config.attention_scale or None, config.stream == "bf16"
        # Three matrices, not one: Muon orthogonalises each separately.
        self.c_q = nn.Linear(config.width, config.width, bias=config.bias)
        self.c_k = nn.Linear(config.width, config.width, bias=config.bias)
        self.c_v = nn.Linear(config.width, config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.mix = nn.Parameter(torch.empty(2)) if config.value_mix else None  # Of its values, and the first layer's.
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, first: Tensor | None, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mix the positions of x (batch, time, width); each position sees itself and earlier ones.

        `first` is the first layer's values; in the first layer it is None. If values are mixed, that layer also returns
        its own.
        """
        batch, time, width = x.shape
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # once, or each of the three products would cast x and keep a copy
            x = x.to(torch.get_autocast_dtype(kind))
        queries, keys, values = self.c_q(x), self.c_k(x), self.c_v(x)
        passed_on = None
        if self.mix is not None:
            if first is None:  # Under FSDP a block must return neither a view nor one of its inputs.
                first = passed_on = values.clone()
            values = self.mix[0] * values + self.mix[1] * first
        # Each (batch, heads, time, width / heads).
        q, k, v = (
            each.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for each in (queries, keys, values)
        )
        q, k = (_rotated(rms_norm(each, in_bf16=self.in_bf16), cosines, sines).to(v.dtype) for each in (q, k))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=self.scale)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, time, width))), passed_on


class ModernMLP(nn.Module):
    """Two layers with a hidden layer four times as wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position separately."""
        positive = F.relu(self.c_fc(x))
        # Bit-identical to positive.square(), which autocast on a GPU would compute, and keep, in fp32.
        return self.dropout(self.c_proj(positive * positive))


class ModernBlock(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(config)
        self.attn = ModernAttention(config)
        self.ln_2 = RMSNorm(config)
        self.mlp = ModernMLP(config)

    def forward(self, x: Tensor, first: Tensor | None, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x plus the results of both parts, in the dtype of x, and the values that attention passes to later
        layers.

        `first` is passed to attention.
        """
        mixed, passed_on = self.attn(self.ln_1(x), first, cosines, sines)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), passed_on


@torch.no_grad()
def initialise_modern(model: nn.Module, gain: float = 1.0) -> None:
    """Draw the embedding from N(0, 0.02) and the matrices with the standard deviation `gain` / sqrt(inputs).

    Nothing else is random: head, projections and biases are zero, gains are one, and a mixture of values begins with
    half of each.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight", "bias")):
            nn.init.zeros_(parameter)
        elif parameter.dim() < 2:
            nn.init.constant_(parameter, 0.5 if name.endswith("mix") else 1.0)
        else:
            nn.init.normal_(parameter, std=EMBEDDING_STD if name == "wte.weight" else gain * parameter.shape[1] ** -0.5)
