"""The blocks of the `modern` preset: what has held up since GPT-2 and still needs nothing but stock torch.

Positions by rotation (RoPE, Su et al. 2021, arXiv:2104.09864), queries and keys of unit length (QK-norm), ReLU squared
(So et al. 2021, arXiv:2109.08668), RMSNorm without weights, no biases, a head of its own. Whatever writes into the
residual stream or gives the logits starts at zero, so that the network starts as its embedding and nothing else. With
`value_mix` values are a learned mixture with the first layer's (Zhou et al. 2024, arXiv:2410.17897).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.recipe import ModelConfig

__all__ = ["ModernBlock", "RMSNorm", "initialise_modern", "rms_norm", "rotation"]

ROTARY_BASE = 10_000.0
"""The slowest pair of channels turns once in about 2 pi times as many positions."""
EMBEDDING_STD = 0.02


def rms_norm(x: Tensor) -> Tensor:
    """Return x (…, width) with a mean square of one: in fp32, whatever autocast and the input say."""
    return F.rms_norm(x.float(), x.shape[-1:])


class RMSNorm(nn.Module):
    """Divides every vector by its root mean square."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (…, width) in fp32 with a mean square of one."""
        return rms_norm(x)


def rotation(time: int, channels: int, device: torch.device, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (time, channels / 2), fp32, by which `channels` of a head turn at each position.

    Of less than all a `share` turns; the others say what they say wherever they stand.
    """
    turned = max(2, 2 * round(share * channels / 2))
    frequencies = ROTARY_BASE ** -(torch.arange(0, turned, 2, device=device, dtype=torch.float32) / turned)
    frequencies = F.pad(frequencies, (0, (channels - turned) // 2))
    angles = torch.arange(time, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn channel i of x (…, time, channels) together with channel i + channels / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class ModernAttention(nn.Module):
    """Causal self-attention whose scores are cosines of rotated queries and keys, times sqrt(channels)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        # Three matrices, not one: Muon makes each orthogonal by itself.
        self.c_q = nn.Linear(config.width, config.width, bias=False)
        self.c_k = nn.Linear(config.width, config.width, bias=False)
        self.c_v = nn.Linear(config.width, config.width, bias=False)
        self.c_proj = nn.Linear(config.width, config.width, bias=False)
        self.mix = nn.Parameter(torch.empty(2)) if config.value_mix else None  # Of its own values, and of the first's.
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, first: Tensor | None, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mix the positions of x (batch, time, width); each sees itself and those before it.

        `first` are the first layer's values, None in that layer, which returns them, too, where they are mixed in.
        """
        batch, time, width = x.shape
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # once, or each of the three products would cast it and keep its copy
            x = x.to(torch.get_autocast_dtype(kind))
        queries, keys, values = self.c_q(x), self.c_k(x), self.c_v(x)
        told = None
        if self.mix is not None:
            if first is None:  # A block under FSDP is to return no view, and none of what it was given.
                first = told = values.clone()
            values = self.mix[0] * values + self.mix[1] * first
        # Each (batch, heads, time, width / heads).
        q, k, v = (
            each.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for each in (queries, keys, values)
        )
        q, k = (_rotated(rms_norm(each), cosines, sines).to(v.dtype) for each in (q, k))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, time, width))), told


class ModernMLP(nn.Module):
    """Two layers, four times as wide between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=False)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position by itself."""
        positive = F.relu(self.c_fc(x))
        # The same to the bit as its square, which autocast on a card would compute, and keep, in fp32.
        return self.dropout(self.c_proj(positive * positive))


class ModernBlock(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = RMSNorm()
        self.attn = ModernAttention(config)
        self.ln_2 = RMSNorm()
        self.mlp = ModernMLP(config)

    def forward(self, x: Tensor, first: Tensor | None, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add to the residual stream, which stays fp32 under autocast; `first` is for the attention, and from it."""
        mixed, told = self.attn(self.ln_1(x), first, cosines, sines)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), told


@torch.no_grad()
def initialise_modern(model: nn.Module) -> None:
    """Draw matrices from N(0, 1 / sqrt(inputs)), the embedding from N(0, 0.02); head and projections are zero.

    A mixture of values begins with half of each.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight")):
            nn.init.zeros_(parameter)
        elif name.endswith("mix"):
            nn.init.constant_(parameter, 0.5)
        else:
            nn.init.normal_(parameter, std=EMBEDDING_STD if name == "wte.weight" else parameter.shape[1] ** -0.5)
