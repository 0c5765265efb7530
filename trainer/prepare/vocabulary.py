"""The vocabulary of a corpus that is being prepared: GPT-2's as it is, or its own characters, counted by all processes.

It is written into the folder before any shard, so that every process and every later call has the same one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.prepare.division import Task
from trainer.prepare.shards import read_vocabulary, write_vocabulary
from trainer.prepare.sources.reading import read_spans
from trainer.prepare.tokenizers import (
    CharTokenizer,
    Tokenizer,
    count_characters,
    load_gpt2,
    tokenizer_of,
)
from trainer.prepare.workers import Tell, work_through

__all__ = ["make_vocabulary"]


def make_vocabulary(
    folder: Path, name: str, tasks: Sequence[Task], column: str, workers: int, say: Callable[[str], None]
) -> Tokenizer:
    """The tokeniser for a corpus, with its vocabulary in `folder`; one that is there was made for these tasks."""
    if (folder / "vocab.json").exists():
        return tokenizer_of(name, read_vocabulary(folder))
    tokenizer = _characters(tasks, column, workers, say) if name == CharTokenizer.name else load_gpt2(say)
    # Under another name first: what is there is whole.
    fresh = folder / ".vocabulary"
    fresh.mkdir(exist_ok=True)
    write_vocabulary(fresh, tokenizer.name, tokenizer.tokens)
    os.rename(fresh / "vocab.json", folder / "vocab.json")
    fresh.rmdir()
    return tokenizer


@dataclass(frozen=True)
class CharacterCounter:
    """The job of a worker: count the characters of a task, as int64 of every code point up to the highest it has."""

    column: str

    def open(self) -> Callable[[Task, Tell], np.ndarray]:
        """There is nothing to load."""
        return lambda task, _: np.trim_zeros(count_characters(t.text for t in read_spans(task, self.column)), "b")


def _characters(tasks: Sequence[Task], column: str, workers: int, say: Callable[[str], None]) -> CharTokenizer:
    say("counting the characters of the corpus")
    counts = count_characters([])
    for _, found in work_through(CharacterCounter(column), tasks, workers, lambda place, count: None):
        counts[: len(found)] += found
    return CharTokenizer.for_counts(counts)
