"""Makes the tokeniser for a corpus: GPT-2's, the corpus's own characters, or tokens trained on the corpus.

The vocabulary is written to the folder before any shard, so that all processes and later calls use the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data.bpe import SAMPLE_CHARS, train_bpe
from gpurun.data.documents import documents_of
from gpurun.data.layout import Layout
from gpurun.data.refusals import Say
from gpurun.data.tasks import Task

_SAMPLED_TASKS = 32


def make_vocabulary(
    folder: Path, name: str, size: int, tasks: Sequence[Task], layout: Layout, say: Say
) -> tokenizers.TextTokenizer:
    """Return the tokeniser for a corpus, and write its vocabulary to `folder` unless it is there already.

    `size` is the number of tokens to train, or the maximum number of characters; 0 means the default.
    """
    if (folder / "vocab.json").exists():
        return tokenizers.tokenizer_of(name, tokenizers.read_vocabulary(folder))
    tokenizer: tokenizers.TextTokenizer
    if name == "char":
        tokenizer = _build_char_tokenizer(tasks, layout, size, say)
    elif name == "bpe":
        tokenizer = tokenizers.BpeTokenizer(train_bpe(_sample_tasks(tasks, layout), size))
        say(f"{len(tokenizer.tokens):,} tokens trained on the text")
    else:
        tokenizer = tokenizers.load_gpt2(say)
    shard_files.write_json(folder / "vocab.json", tokenizers.vocabulary_json(name, tokenizer.tokens))
    return tokenizer


def _build_char_tokenizer(tasks: Sequence[Task], layout: Layout, size: int, say: Say) -> tokenizers.CharTokenizer:
    """Return a tokeniser for the corpus's characters, at most `size`; report the characters that are left out."""
    counts = tokenizers.count_characters(document.text for task in tasks for document in documents_of(task, layout))
    tokenizer = tokenizers.CharTokenizer.from_character_counts(counts, size)
    known = {ord(token.decode("utf-8")) for token in tokenizer.tokens}
    lost = [code for code in counts.nonzero()[0].tolist() if code not in known]
    say(f"{len(known):,} characters")
    if lost:
        share = counts[lost].sum() / counts.sum()
        say(f"{len(lost):,} rarer characters, {share:.2%} of the text, have no id and are read as U+FFFD")
    return tokenizer


def _sample_tasks(tasks: Sequence[Task], layout: Layout) -> Iterator[str]:
    """Yield the beginnings of tasks that are spread over the whole source, some megabytes in total."""
    chosen = [tasks[place] for place in sorted({i * len(tasks) // _SAMPLED_TASKS for i in range(_SAMPLED_TASKS)})]
    for task in chosen:
        left = SAMPLE_CHARS // len(chosen)
        for document in documents_of(task, layout):
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                break
