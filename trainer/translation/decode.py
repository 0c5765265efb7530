"""Translations from the model: greedy search and beam search. The source is encoded once for all steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.translation.batch import SpecialTokens, source_mask
from trainer.translation.model import Translator

__all__ = ["Hypothesis", "beam_search", "greedy_search", "length_penalty"]


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its ids (including the end, if it was reached) and its log-probability in nats."""

    ids: tuple[int, ...]
    log_probability: float

    def score(self, alpha: float) -> float:
        """Return the score that searches compare: the log-probability divided by the length penalty."""
        return self.log_probability / float(length_penalty(torch.tensor(float(len(self.ids))), alpha))


def length_penalty(length: Tensor, alpha: float) -> Tensor:
    """Return ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14): above 0 it compensates for length."""
    return ((5.0 + length) / 6.0) ** alpha


class _Reader:
    """The model as a search uses it: returns the log-probabilities of the next token, for encoded sources."""

    def __init__(self, model: Translator, source: Tensor, special: SpecialTokens, copies: int) -> None:
        self._model, self.vocab = model, model.vocab_size
        self.device = source.device
        self._memory = model.encode(source).repeat_interleave(copies, dim=0)
        self._mask = source_mask(source, special.pad_id).repeat_interleave(copies, dim=0)
        # Padding and start are never generated.
        self._banned = torch.zeros(self.vocab, dtype=torch.bool, device=source.device)
        self._banned[[special.pad_id, special.start_id]] = True

    def __call__(self, ids: Tensor) -> Tensor:
        """Return log-probabilities (rows, vocab) of the token after the ids (rows, time), start included."""
        logits = self._model.next_token_logits(ids, self._memory, self._mask)
        return logits.masked_fill(self._banned, -torch.inf).log_softmax(dim=-1)


def _limit(model: Translator, most: int | None) -> int:
    return model.config.context if most is None else min(most, model.config.context)


def _hypothesis(ids: Tensor, log_probability: Tensor, length: Tensor) -> Hypothesis:
    """Return the hypothesis with the first `length` ids after the start."""
    return Hypothesis(tuple(ids[1 : 1 + int(length)].tolist()), float(log_probability))


@torch.no_grad()
def greedy_search(
    model: Translator,
    source: Tensor,
    special: SpecialTokens,
    *,
    most: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Hypothesis]:
    """Translate each row of source ids (batch, source) by the likeliest next token.

    A translation has at most `most` tokens, including its end, and no more than the context allows. The model must be
    in evaluation mode. `stopping` is checked before each token.
    """
    rows = source.shape[0]
    read = _Reader(model, source, special, 1)
    ids = torch.full((rows, 1), special.start_id, dtype=torch.int64, device=source.device)
    total, lengths = torch.zeros(rows, device=source.device), torch.zeros(rows, device=source.device)
    done = torch.zeros(rows, dtype=torch.bool, device=source.device)
    for _ in range(_limit(model, most)):
        if stopping() or bool(done.all()):
            break
        best = read(ids).max(dim=-1)
        total, lengths = total + torch.where(done, 0.0, best.values), lengths + ~done
        chosen = torch.where(done, special.pad_id, best.indices)
        ids, done = torch.cat([ids, chosen[:, None]], dim=1), done | (chosen == special.end_id)
    return [_hypothesis(*row) for row in zip(ids, total, lengths, strict=True)]


@torch.no_grad()
def beam_search(
    model: Translator,
    source: Tensor,
    special: SpecialTokens,
    *,
    beams: int,
    alpha: float,
    most: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Hypothesis]:
    """Translate each row of source ids (batch, source), keeping the `beams` best hypotheses after every token.

    The best have the highest `Hypothesis.score(alpha)`; a finished hypothesis is kept while it is one of the best. A
    beam search may miss what greedy search finds, so both results are compared: no result has a lower score than greedy
    search's.
    """
    greedy = greedy_search(model, source, special, most=most, stopping=stopping)
    if beams == 1:
        return greedy
    read = _Reader(model, source, special, beams)
    found = _best_of_beams(read, source.shape[0], special, beams, alpha, _limit(model, most), stopping)
    return [max(pair, key=lambda hypothesis: hypothesis.score(alpha)) for pair in zip(greedy, found, strict=True)]


def _best_of_beams(
    read: _Reader, rows: int, special: SpecialTokens, beams: int, alpha: float, limit: int, stopping: Callable[[], bool]
) -> list[Hypothesis]:
    """Return the best hypothesis of each row's beam."""
    vocab, device = read.vocab, read.device
    ids = torch.full((rows, beams, 1), special.start_id, dtype=torch.int64, device=device)
    # All beams start equal, so only the first of them counts until they differ.
    total = torch.full((rows, beams), -torch.inf, device=device)
    total[:, 0] = 0.0
    lengths = torch.zeros(rows, beams, device=device)
    done = torch.zeros(rows, beams, dtype=torch.bool, device=device)
    # A finished hypothesis continues as itself, as one candidate without cost.
    itself = torch.full((vocab,), -torch.inf, device=device)
    itself[special.pad_id] = 0.0
    for _ in range(limit):
        if stopping() or bool(done.all()):
            break
        following = read(ids.flatten(0, 1)).view(rows, beams, vocab)
        candidates = total[..., None] + torch.where(done[..., None], itself, following)
        grown = lengths + ~done
        scores = candidates / length_penalty(grown, alpha)[..., None]
        best = scores.flatten(1).topk(beams).indices
        origin, chosen = best // vocab, best % vocab
        total = candidates.flatten(1).gather(1, best)
        lengths, done = grown.gather(1, origin), done.gather(1, origin) | (chosen == special.end_id)
        ids = torch.cat([ids.gather(1, origin[..., None].expand_as(ids)), chosen[..., None]], dim=2)
    # The beam is sorted, so its first hypothesis is its best.
    return [_hypothesis(*row) for row in zip(ids[:, 0], total[:, 0], lengths[:, 0], strict=True)]
