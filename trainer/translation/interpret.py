"""What turns token ids into a translation's, and those into text: all that a trained model needs beside itself."""

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
"""The token of each tokeniser that stands for all that its vocabulary has not."""
_UNSAID = {"word-pairs": " \u2047".encode(), "char-pairs": "\u2047".encode()}
"""What stands for it in a reference, as one word or sign."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The vocabulary of both languages, and which of its tokens say nothing."""

    tokenizer: Tokenizer
    special: SpecialTokens

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a translation's ids."""
        silent = (self.special.pad_id, self.special.start_id, self.special.end_id)
        return self.tokenizer.decode([i for i in ids if i not in silent]).strip()

    def reference(self, ids: Sequence[int]) -> str:
        """Return the text of a reference's ids, to hold translations against.

        What the vocabulary has not is lost from it, and is a sign there that no translation says: or one that says
        "unknown" in its place would pass for right.
        """
        name, tokens = self.tokenizer.name, self.tokenizer.tokens
        silent, unknown = (self.special.pad_id, self.special.start_id, self.special.end_id), UNKNOWN.get(name)
        said = [_UNSAID[name] if tokens[i] == unknown else tokens[i] for i in ids if i not in silent]
        return b"".join(said).decode("utf-8", errors="replace").strip()

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
        """Translate sources, given as plain token ids, into at most `most` tokens (None: as the context has room).

        One beam is greedy search. Leaves the model in its old mode.
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
