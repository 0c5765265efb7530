"""Text from the model: one token after the other, through the plain (never the compiled) module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.config import SampleConfig
from trainer.model import GPT

__all__ = ["generate", "pick"]

COLDEST = 1e-30
"""Below it the likeliest token has all the probability, and the quotients would be too large for fp32."""


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one id from logits (vocab,): the likeliest at temperature 0; among the `top_k` likeliest unless it is 0."""
    if temperature < COLDEST:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < torch.topk(logits, top_k).values[-1], -torch.inf)
    return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator))


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Sequence[int],
    config: SampleConfig,
    *,
    vocab_size: int,
    seed: int,
    stopping: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Return the prompt's ids and up to `config.tokens` more, all below `vocab_size`; the same seed, the same text.

    The vocabulary's padding is never drawn. `stopping` is asked before each token.
    """
    ids = list(prompt)
    device = model.wte.weight.device
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.tokens):
        if stopping():
            break
        seen = torch.tensor([ids[-model.config.context :]], device=device)
        logits = model.next_token_logits(seen)[0, :vocab_size].float().cpu()
        ids.append(pick(logits, config.temperature, config.top_k, generator))
    return ids
