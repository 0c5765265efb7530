"""BLEU by sacrebleu, so that the figure is comparable with published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import Refused

__all__ = ["Bleu", "corpus_bleu"]


@dataclass(frozen=True)
class Bleu:
    """A corpus's BLEU, 0 to 100, and sacrebleu's signature, which records how it was computed."""

    score: float
    signature: str


def corpus_bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """Score translations, each against its one reference; Refused if sacrebleu is not installed."""
    try:
        from sacrebleu import BLEU
    except ImportError:
        raise Refused('BLEU needs sacrebleu, which is not installed: pip install "sacrebleu>=2.4"') from None
    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)]).score
    return Bleu(score, str(metric.get_signature()))
