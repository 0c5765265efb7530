"""Turns parallel text into shards: each sentence pair is one row of tokens (docs/TRANSLATION.md). Does not need torch.

A pair is written as start, source, end, target, end. The start token is the manifest's `eot`. Both languages share one
vocabulary of characters or words, which is made from the training pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import pair_tokenizer as pair_tokenizers
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.data.pairs.grammar import english_german
from gpurun.data.refusals import Say
from gpurun.data.source_names import BUILT_IN_PAIRS
from gpurun.data.split import bound_for, hash_text

_PAIRS_MADE = 20_000


@dataclass(frozen=True)
class PairOrder:
    """What to prepare: one of BUILT_IN_PAIRS, a file of `source TAB target` lines, or two files (`A,B`)."""

    source: str
    tokenizer: str
    val_fraction: float
    out: Path
    context: int = 64
    """The most positions that a pair may need; longer pairs are left out and counted."""
    limit_bytes: int = 0
    vocab_limit: int = 0


@dataclass
class _ParallelText:
    """Sentence pairs and the files that they come from; pairs without text on one side are only counted."""

    kind: str
    pairs: list[pair_tokenizers.Pair] = field(default_factory=list)
    skipped: int = 0

    def add(self, source: str, target: str) -> None:
        """Add a pair, with runs of white space reduced to single spaces."""
        pair = " ".join(source.split()), " ".join(target.split())
        if all(pair):
            self.pairs.append(pair)
        else:
            self.skipped += 1

    def digest(self) -> str:
        """Return the sha256 of all pairs; each side is preceded by its length."""
        return tokenizers.sha256_of_tokens(text.encode("utf-8") for pair in self.pairs for text in pair)

    def limited(self, limit_bytes: int) -> None:
        """Keep the first pairs, up to `limit_bytes` of text."""
        total = 0
        for number, pair in enumerate(self.pairs):
            total += sum(len(text.encode("utf-8")) for text in pair)
            if total > limit_bytes:
                del self.pairs[number:]
                return


def _generate_copies(count: int, seed: int = 0) -> list[pair_tokenizers.Pair]:
    """Return `count` different rows of 4 to 10 letters, each its own translation."""
    state, drawn = np.random.RandomState(seed), dict[str, None]()
    while len(drawn) < count:
        letters = state.randint(10, size=state.randint(4, 11))
        drawn["".join(chr(ord("a") + letter) for letter in letters)] = None
    return [(text, text) for text in drawn]


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        hint = "Name a file of `source TAB target` lines, two files with a comma between them, or: "
        hint += ", ".join(BUILT_IN_PAIRS) + "."
        raise UsageError("data.unreadable", f"{path} cannot be read: {error.strerror}.", hint=hint) from None
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 at byte {error.start}."
        raise UsageError("data.not_utf8", what, hint="Convert it to UTF-8 first.") from None
    # splitlines would also split at characters inside a sentence, and the lines of the two files would no longer match.
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _read_parallel_text(source: str) -> _ParallelText:
    """Read or generate the parallel text that a request names."""
    if source in BUILT_IN_PAIRS:
        made = _generate_copies(_PAIRS_MADE) if source == "copy" else english_german(_PAIRS_MADE)
        return _ParallelText(source, made)
    text = _ParallelText("file")
    files = [Path(name).expanduser() for name in source.split(",")]
    if len(files) == 2:
        sides = [_read_lines(file) for file in files]
        if len(sides[0]) != len(sides[1]):
            counts = f"{files[0]} has {len(sides[0])} lines, {files[1]} has {len(sides[1])}"
            hint = "Line n of one must be the translation of line n of the other."
            raise UsageError("data.not_parallel", f"{counts}.", hint=hint)
        for pair in zip(*sides, strict=True):
            text.add(*pair)
        return text
    path = Path(source).expanduser()
    for number, line in enumerate(_read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2 and line.strip():
            hint = "Each line must be a sentence, a tab, and its translation; or give two files as A,B."
            raise UsageError(
                "data.not_parallel", f"Line {number} of {path} has {len(columns)} columns, not 2.", hint=hint
            )
        text.add(columns[0], columns[-1] if len(columns) == 2 else "")
    return text


def prepare_pairs(order: PairOrder, say: Say) -> tuple[pair_tokenizers.PairTokenizer, int]:
    """Turn a parallel text into the data folder `order.out`; return its tokeniser and the number of incomplete lines.

    data.json is written last. UsageError if the text is unusable, OSError if writing fails.
    """
    text = _read_parallel_text(order.source)
    if order.limit_bytes:
        text.limited(order.limit_bytes)
    splits: dict[str, list[pair_tokenizers.Pair]] = {"train": [], "val": []}
    bound = bound_for(order.val_fraction)
    for pair in text.pairs:  # The source sentence decides, so that all its translations are in the same split.
        splits["val" if hash_text(pair[0]) < bound else "train"].append(pair)
    tokenizer = pair_tokenizers.PairTokenizer.for_pairs(order.tokenizer, splits["train"], order.vocab_limit)
    order.out.mkdir(parents=True)
    _write_data(order, text, splits, tokenizer, say)
    return tokenizer, text.skipped


def _write_data(
    order: PairOrder,
    text: _ParallelText,
    splits: dict[str, list[pair_tokenizers.Pair]],
    tokenizer: pair_tokenizers.PairTokenizer,
    say: Say,
) -> None:
    """Write shards, vocabulary and data.json."""
    entries: dict[str, list[dict[str, Any]]] = {}
    counts = {"train": 0, "val": 0, "too_long": 0, "longest": 0}
    for split, pairs in splits.items():
        with shard_files.ShardWriter(order.out, split) as writer:
            for row in _build_rows(tokenizer, pairs):
                # The source also has a start and an end token; the target, as input or output, has only one of the two.
                longest = max(row.middle + 1, len(row.ids) - row.middle - 1)
                counts["too_long" if longest > order.context else split] += 1
                if longest <= order.context:
                    writer.write(row.ids)
                    counts["longest"] = max(counts["longest"], longest)
        entries[split] = writer.entries
        if not counts[split]:
            what = f"{order.source} has no pairs for {split}: {len(text.pairs)} pairs were read"
            what += f", {counts['too_long']} are longer than {order.context} tokens"
            hint = "Use more text, a different --val-fraction, or a longer context."
            raise UsageError("data.too_small", f"{what}.", hint=hint)
        say(f"{split}: {counts[split]:,} pairs, {writer.tokens:,} tokens")
    if counts["too_long"]:
        say(f"{counts['too_long']:,} pairs are longer than {order.context} tokens and were left out")
    shard_files.write_json(order.out / "vocab.json", tokenizers.vocabulary_json(tokenizer.name, tokenizer.tokens))
    size = sum(len(side.encode("utf-8")) for pair in text.pairs for side in pair)
    source = {"kind": text.kind, "digest": text.digest(), "documents": len(text.pairs), "bytes": size}
    ids = {"pad_id": pair_tokenizers.PAD_ID, "start_id": pair_tokenizers.START_ID, "end_id": pair_tokenizers.END_ID}
    manifest = shard_files.manifest_of(tokenizer.name, tokenizer.tokens, tokenizer.eot_id, source, entries)
    shard_files.write_json(order.out / "data.json", {**manifest, "pairs": {**ids, **counts}})


@dataclass(frozen=True)
class _Row:
    """A pair's tokens, and the position where its source ends."""

    ids: np.ndarray
    middle: int


def _build_rows(tokenizer: pair_tokenizers.PairTokenizer, pairs: Sequence[pair_tokenizers.Pair]) -> Iterator[_Row]:
    start, end = (np.array([token], dtype=np.uint16) for token in (pair_tokenizers.START_ID, pair_tokenizers.END_ID))
    for pair in pairs:
        source, target = tokenizer.encode(pair)
        yield _Row(np.concatenate([start, source, end, target, end]), len(source) + 1)
