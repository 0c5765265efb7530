"""Text from the model: one token after the other, through the plain (never the compiled) module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.model import GPT
from trainer.recipe import SampleConfig

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
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    *,
    seeds: Sequence[int],
    stopping: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return each prompt's ids and up to `config.tokens` more; the same seed, the same text.

    All prompts go on in one batch: on a card, a forward of several rows takes no longer than that of one. `stopping` is
    asked before each token of all.
    """
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(config.tokens):
        if stopping():
            break
        logits = _next_logits(model, texts).cpu()
        for ids, row, generator in zip(texts, logits, generators, strict=True):
            ids.append(pick(row, config.temperature, config.top_k, generator))
    return texts


def _next_logits(model: GPT, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits (text, vocab) after each text's end: shorter ones are filled up behind it, where none looks."""
    seen = [text[-model.config.context :] for text in texts]
    longest = max(len(ids) for ids in seen)
    device = model.wte.weight.device
    rows = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in seen], device=device)
    return model.next_token_logits(rows, torch.tensor([len(ids) - 1 for ids in seen], device=device))
