"""Provides what a training loop needs for translation: the data, the model, and translations.

The translations are of prompts and of held-out text. The loop is that of trainer/train.py: it reads `train_samples` and
`val_samples`, and passes them to `model`. Everything depends only on the recipe, the data folder and the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from trainer.data import VALIDATION_SEED
from trainer.distributed import Processes
from trainer.errors import Refused
from trainer.items import Item
from trainer.recipe import Recipe, SampleConfig
from trainer.shards import Prompt, TokenData
from trainer.translation.decode import beam_search
from trainer.translation.interpret import Interpreter
from trainer.translation.model import Attention, Translator
from trainer.translation.pairs import PairRow, PairSamples, read_special_tokens

__all__ = ["TranslationTask"]


@dataclass(frozen=True, kw_only=True)
class TranslationTask(Interpreter):
    """A parallel text that has been opened and checked for a recipe."""

    items: ClassVar[tuple[Item, ...]] = ()
    """Always empty: HellaSwag is not for translators."""
    data: TokenData
    train: PairRow
    val: PairRow
    train_samples: PairSamples
    val_samples: PairSamples
    eval_windows: int
    """How many held-out pairs an evaluation uses; `val_samples` has all of these in its step 0."""

    @classmethod
    def open(
        cls, recipe: Recipe, folder: Path, data: TokenData, sequences: int, processes: Processes
    ) -> TranslationTask:
        """Open the pairs of a data folder for steps of `sequences` pairs; Refused if they do not fit the recipe."""
        special, context = read_special_tokens(folder, data.tokenizer.vocab_size), recipe.model.context
        train = PairRow(data.train, special, context, "train", processes.local_count)
        val = PairRow(data.val, special, context, "val", processes.local_count)
        eval_windows = min(len(val), max(1, recipe.eval.tokens // context))
        for prompt in data.prompts:
            if len(prompt.ids) + 2 > context:
                raise Refused(f'the prompt "{prompt.text[:40]}" needs more than model.context {context} positions')
        return cls(
            data=data, tokenizer=data.tokenizer, special=special, train=train, val=val, eval_windows=eval_windows,
            train_samples=PairSamples(train, sequences, recipe.train.seed),
            val_samples=PairSamples(val, eval_windows, VALIDATION_SEED),
        )  # fmt: skip

    @property
    def eval_tokens(self) -> int:
        """Return how many real labels an evaluation uses."""
        return self.val_samples.step_tokens(0)

    def build_model(self, recipe: Recipe) -> Translator:
        """Return the recipe's model for the data's vocabulary, its weights drawn on the CPU by the recipe's seed."""
        torch.manual_seed(recipe.train.seed)
        vocab_size, smoothing = self.data.tokenizer.vocab_size, recipe.train.label_smoothing
        return Translator(recipe.model, vocab_size, pad_id=self.special.pad_id, label_smoothing=smoothing)

    def bytes_of_ids(self) -> None:
        """Return None: bits per byte are defined for one text, but a pair has two."""

    def answers(
        self, model: nn.Module, prompts: Sequence[Prompt], sample: SampleConfig, seeds: Sequence[int],
        stopping: Callable[[], bool],
    ) -> list[str]:  # fmt: skip
        """Return each prompt's translation, found by a search without drawing."""
        assert isinstance(model, Translator)
        ids, settings = [prompt.ids for prompt in prompts], {"beams": sample.beams, "most": sample.tokens}
        found = self.translate(model, ids, alpha=sample.length_penalty, stopping=stopping, **settings)
        return [self.text(hypothesis.ids) for hypothesis in found]

    @staticmethod
    def landmarks(model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Return the functions of this kind of model that `source_map` lists."""
        return {"embedding": Translator._embed, "attention": Attention.forward, "generation": beam_search}

    def translate_held_out(
        self, model: Translator, pairs: int, *, beams: int, alpha: float, at_once: int = 64
    ) -> tuple[list[str], list[str]]:
        """Return (translations, references) of the same `pairs` held-out pairs each time, or of all if fewer."""
        chosen = [self.val_samples.pair(sample) for sample in range(min(pairs, len(self.val)))]
        translations: list[str] = []
        for start in range(0, len(chosen), at_once):
            sources = [self.val.source(pair)[1:-1].tolist() for pair in chosen[start : start + at_once]]
            found = self.translate(model, sources, beams=beams, alpha=alpha)
            translations += [self.text(hypothesis.ids) for hypothesis in found]
        return translations, [self.reference(self.val.target(pair).tolist()) for pair in chosen]
