"""The encoder-decoder Transformer, pre-norm: each sub-layer reads a normalised copy of the stream that it adds to.

As in the paper: sinusoidal positions, one matrix for source, target and head, embeddings times sqrt(width), a
feed-forward part four times as wide with ReLU, dropout on every sub-layer and on the sums of embeddings and positions.
As in its annotated form: LayerNorm before a sub-layer and once at the end, Xavier's weights, dropout on attention too.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.loss import chunked_cross_entropy
from trainer.model import with_vocabulary
from trainer.recipe import ModelConfig
from trainer.translation.batch import source_mask, target_mask

__all__ = ["Translator", "sinusoids"]


def sinusoids(positions: int, width: int) -> Tensor:
    """Return the table (positions, width) of section 3.5: sin(t / 10000^(2i / width)) in column 2i, cos in 2i + 1."""
    time = torch.arange(positions, dtype=torch.float64)[:, None]
    angle = time * torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    table = torch.empty(positions, width, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()[:, : width // 2]
    return table.float()


class Attention(nn.Module):
    """Attention over `heads` heads, by torch's own fused kernel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.width, config.width, bias=config.bias) for _ in range(4)
        )

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (batch, time, width) to (batch, heads, time, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Let each position of x (batch, time, width) attend to memory (batch, keys, width) where the mask is true.

        `mask` is bool and broadcasts to (batch, heads, time, keys); every position has at least one true key.
        """
        q, k, v = self._split(self.query(x)), self._split(self.key(memory)), self._split(self.value(memory))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two layers with a hidden layer four times as wide."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wide = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.narrow = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position separately."""
        return self.narrow(self.dropout(self.wide(x).relu()))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(config.width, bias=config.bias) for _ in range(2))
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return x, the stream of the source, plus the results of both parts."""
        y = self.norm_1(x)
        x = x + self.dropout(self.attention(y, y, mask))
        return x + self.dropout(self.feed_forward(self.norm_2(x)))


class DecoderBlock(nn.Module):
    """Self-attention, attention to the source, then feed-forward, each added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(config.width, bias=config.bias) for _ in range(3))
        self.attention, self.source_attention = Attention(config), Attention(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor, mask: Tensor) -> Tensor:
        """Return x, the stream of the target, plus the results of the three parts; `memory` is the encoder's output."""
        y = self.norm_1(x)
        x = x + self.dropout(self.attention(y, y, mask))
        x = x + self.dropout(self.source_attention(self.norm_2(x), memory, memory_mask))
        return x + self.dropout(self.feed_forward(self.norm_3(x)))


class Translator(nn.Module):
    """The whole network: `config.layers` blocks on each side; `vocab_size` is the tokeniser's (default: config's)."""

    positions: Tensor

    def __init__(
        self, config: ModelConfig, vocab_size: int | None = None, *, pad_id: int, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size or config.vocab_size
        self.config = config = with_vocabulary(config, self.vocab_size)
        self.pad_id, self.label_smoothing = pad_id, label_smoothing
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.register_buffer("positions", sinusoids(config.context, config.width), persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.encoder_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.decoder_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the matrices as Glorot and Bengio 2010 do, uniformly; biases are zero."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    collective_methods = ("encode", "decode", "next_token_logits")
    """The methods besides `forward` that are called from outside: under full sharding these fetch weights too."""

    @property
    def blocks(self) -> list[nn.Module]:
        """Return all blocks; full sharding divides the model into these units."""
        return [*self.encoder, *self.decoder]

    def _embed(self, ids: Tensor) -> Tensor:
        """Return token plus position (batch, time, width), with the token scaled by sqrt(width)."""
        scaled = self.embedding(ids) * math.sqrt(self.config.width)
        return self.dropout(scaled + self.positions[: ids.shape[1]])

    def encode(self, source: Tensor) -> Tensor:
        """Return the decoder's memory (batch, source, width) for source ids (batch, source)."""
        x, mask = self._embed(source), source_mask(source, self.pad_id)
        for block in self.encoder:
            x = block(x, mask)
        return self.encoder_norm(x)

    def decode(self, target: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Return the head's input (batch, target, width) for target ids, given the encoded source and its mask."""
        x, mask = self._embed(target), target_mask(target, self.pad_id)
        for block in self.decoder:
            x = block(x, memory, memory_mask, mask)
        return self.decoder_norm(x)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Return the mean cross-entropy (nats per real label, fp32) times `weight`; in training, with label smoothing.

        Micro-batches have different numbers of real labels. With each one's share as its weight (PairSamples) the mean
        over micro-batches is the mean over the labels of the whole batch, as one large batch would give.
        """
        hidden = self.decode(target, self.encode(source), source_mask(source, self.pad_id))
        loss = chunked_cross_entropy(
            hidden.flatten(0, 1), self.embedding.weight, labels.flatten(), vocab_size=self.vocab_size,
            ignore_index=self.pad_id, label_smoothing=self.label_smoothing if self.training else 0.0,
        )  # fmt: skip
        return loss * weight

    def next_token_logits(self, target: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Return the logits (batch, vocab_size), fp32, of the token after the last position."""
        hidden = self.decode(target, memory, memory_mask)[:, -1]
        return F.linear(hidden, self.embedding.weight)[:, : self.vocab_size].float()

    def flops_per_token(self) -> int | None:
        """Return None: sentences differ in length, so the number of positions does not determine a step's work."""
        return None
