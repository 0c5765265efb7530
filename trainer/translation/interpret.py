"""Turns token ids into translations, and translations into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.shards import Tokenizer
from trainer.translation.batch import SpecialTokens
from trainer.translation.decode import Hypothesis, beam_search
from trainer.translation.model import Translator

__all__ = ["UNKNOWN", "Interpreter"]

UNKNOWN = {"word-pairs": b"<unk>", "char-pairs": "\ufffd".encode()}
"""The token of each tokeniser that stands for everything outside its vocabulary."""
_UNSAID = {"word-pairs": " \u2047".encode(), "char-pairs": "\u2047".encode()}
"""The replacement of the unknown token in a reference, as one word or sign."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The vocabulary of both languages, with the special ids, which have no text."""

    tokenizer: Tokenizer
    special: SpecialTokens

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a translation's ids."""
        silent = (self.special.pad_id, self.special.start_id, self.special.end_id)
        return self.tokenizer.decode([i for i in ids if i not in silent]).strip()

    def reference(self, ids: Sequence[int]) -> str:
        """Return the text of a reference's ids, for comparison with translations.

        The unknown token, which stands for text outside the vocabulary, becomes a sign that no translation contains.
        Otherwise a translation with the unknown token in the same place would count as correct.
        """
        name, tokens = self.tokenizer.name, self.tokenizer.tokens
        silent, unknown = (self.special.pad_id, self.special.start_id, self.special.end_id), UNKNOWN.get(name)
        pieces = [_UNSAID[name] if tokens[i] == unknown else tokens[i] for i in ids if i not in silent]
        return b"".join(pieces).decode("utf-8", errors="replace").strip()

    def translate(
        self,
        model: Translator,
        sources: Sequence[Sequence[int]],
        *,
        beams: int,
        alpha: float,
        most: int | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> list[Hypothesis]:
        """Translate sources, given as token ids, into at most `most` tokens (None: as many as the context allows).

        One beam is greedy search. The model's mode, training or evaluation, is the same afterwards.
        """
        special = self.special
        rows = [np.array([special.start_id, *ids, special.end_id]) for ids in sources]
        width = max(len(row) for row in rows)
        padded = [np.pad(row, (0, width - len(row)), constant_values=special.pad_id) for row in rows]
        source = torch.from_numpy(np.stack(padded)).to(model.embedding.weight.device)
        was_training = model.training
        model.eval()
        found = beam_search(model, source, special, beams=beams, alpha=alpha, most=most, stopping=stopping)
        model.train(was_training)
        return found
