"""The vocabulary of a corpus that is being prepared: GPT-2's as it is, its own characters, or tokens trained on it.

It is written into the folder before any shard, so that every process and every later call has the same one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.prepare.bpe import SAMPLE_CHARS, check_vocab_size, train_bpe
from trainer.prepare.corpora.division import Task, forms_of
from trainer.prepare.corpora.resume import UNPACKING
from trainer.prepare.corpora.room import check_room
from trainer.prepare.corpora.workers import Tell, work_through
from trainer.prepare.errors import Refusal
from trainer.prepare.shards import read_vocabulary, write_vocabulary
from trainer.prepare.sources.files import Form
from trainer.prepare.sources.reading import load_for, read_spans
from trainer.prepare.tokenizers import (
    BpeTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    Tokenizer,
    count_characters,
    load_gpt2,
    tokenizer_of,
)

__all__ = ["keep_vocabulary", "make_vocabulary"]


def make_vocabulary(
    folder: Path, name: str, size: int, tasks: Sequence[Task], column: str, workers: int, say: Callable[[str], None]
) -> Tokenizer:
    """The tokeniser for a corpus, with its vocabulary in `folder`; one that is there was made for these tasks.

    `size` is the number of tokens of one that is trained, or of characters at most; 0: its own choice.
    """
    if (folder / "vocab.json").exists():
        return tokenizer_of(name, read_vocabulary(folder))
    tokenizer: Tokenizer
    if name == CharTokenizer.name:
        check_room(folder, tasks, None, column, lambda _: None)  # The count is a pass over the whole corpus.
        counter = CharacterCounter(column, folder / UNPACKING, forms_of(tasks))
        tokenizer = _characters(counter, tasks, workers, size, say)
    else:
        tokenizer = _trained(tasks, column, size, say) if name == BpeTokenizer.name else load_gpt2(say)
    _keep(folder, tokenizer)
    return tokenizer


def keep_vocabulary(folder: Path, name: str) -> None:
    """See to it that the folder has the vocabulary of that tokeniser: GPT-2's is put there, others must be there."""
    path = folder / "vocab.json"
    found = json.loads(path.read_bytes())["name"] if path.exists() else None
    if found is None and name == Gpt2Tokenizer.name:
        _keep(folder, load_gpt2(lambda _: None))
    elif found != name:
        there = "no vocab.json" if found is None else f"the vocabulary of {found!r}"
        raise Refusal(
            "data.no_vocabulary",
            f"{folder} has {there}, not the vocabulary of {name!r}.",
            hint="Copy the vocab.json of a folder that was prepared with it, or train it first: docs/DATA.md.",
        )


def _keep(folder: Path, tokenizer: Tokenizer) -> None:
    # Under another name first: what is there is whole.
    fresh = folder / ".vocabulary"
    fresh.mkdir(exist_ok=True)
    write_vocabulary(fresh, tokenizer.name, tokenizer.tokens)
    os.rename(fresh / "vocab.json", folder / "vocab.json")
    fresh.rmdir()


@dataclass(frozen=True)
class CharacterCounter:
    """The job of a worker: count the characters of a task, as int64 of every code point up to the highest it has."""

    column: str
    unpack_in: Path
    forms: frozenset[Form]

    def open(self) -> Callable[[Task, Tell], np.ndarray]:
        """Load what the files are read with."""
        load_for(self.forms)
        return self._counts

    def _counts(self, task: Task, tell: Tell) -> np.ndarray:
        return np.trim_zeros(count_characters(text.text for text in read_spans(task, self.column, self.unpack_in)), "b")


def _characters(
    job: CharacterCounter, tasks: Sequence[Task], workers: int, size: int, say: Callable[[str], None]
) -> CharTokenizer:
    say("counting the characters of the corpus")
    counts = count_characters([])
    for _, found in work_through(job, tasks, workers, lambda place, count: None):
        counts[: len(found)] += found
    return CharTokenizer.for_counts(counts, size)


_SAMPLED_TASKS = 32


@dataclass(frozen=True)
class BpeTrainer:
    """The job of a worker, whose memory ends with it: train on the beginnings of some tasks; the tokens."""

    column: str
    vocab_size: int
    chars: int
    """Of each task, about."""

    def open(self) -> Callable[[Sequence[Task], Tell], list[bytes]]:
        """There is nothing to load."""
        return lambda tasks, _: train_bpe((text for task in tasks for text in self._beginning(task)), self.vocab_size)

    def _beginning(self, task: Task) -> Iterator[str]:
        left = self.chars
        for text in read_spans(task, self.column):
            yield text.text[:left]
            left -= len(text.text)
            if left <= 0:
                return


def _trained(tasks: Sequence[Task], column: str, size: int, say: Callable[[str], None]) -> BpeTokenizer:
    wanted = check_vocab_size(size)
    say(f"training a vocabulary of {wanted:,} tokens on the text")
    chosen = [tasks[place] for place in sorted({i * len(tasks) // _SAMPLED_TASKS for i in range(_SAMPLED_TASKS)})]
    job = BpeTrainer(column, size, SAMPLE_CHARS // len(chosen))
    ((_, tokens),) = work_through(job, [chosen], 1, lambda place, count: None)
    return BpeTokenizer(tokens)
