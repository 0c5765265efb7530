"""Parallel text in, shards out: sentence pairs as one row of tokens (docs/TRANSLATION.md). No torch.

A pair is written as start, source, end, target, end; its start is what `eot` is to other text. Both languages share one
vocabulary, made of the training pairs: characters, or words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.prepare.build import Say
from trainer.prepare.errors import Refusal
from trainer.prepare.folders import replace_folder, staging
from trainer.prepare.manifest import manifest_of, summary_of
from trainer.prepare.pairs.grammar import english_german
from trainer.prepare.pairs.tokenizers import END_ID, ENDS, PAD_ID, START_ID, Pair, PairTokenizer
from trainer.prepare.shards import ShardWriter, sha256_of_file, write_json, write_prompts, write_vocabulary
from trainer.prepare.tokenizers import sha256_of_tokens

__all__ = ["BUILT_IN", "PairRequest", "prepare_pairs"]

BUILT_IN = ("copy", "english-german")
"""Sources that are made here: random letters to repeat, and 20,000 sentences by rule."""
BUILT_IN_PAIRS = 20_000


@dataclass(frozen=True)
class PairRequest:
    """What to prepare: one of BUILT_IN, a file of `source TAB target` lines, or two files with a comma between them."""

    source: str
    tokenizer: str
    val_fraction: float
    prompts: tuple[str, ...]
    out: Path
    context: int = 64
    """Pairs of which a side takes more positions than this are left out, and counted."""
    limit_bytes: int = 0
    vocab_limit: int = 0


@dataclass
class _ParallelText:
    """Pairs with where they came from; those without text on one side are only counted."""

    kind: str
    pairs: list[Pair] = field(default_factory=list)
    skipped: int = 0

    def add(self, source: str, target: str) -> None:
        """Take a pair, in single spaces."""
        pair = " ".join(source.split()), " ".join(target.split())
        if all(pair):
            self.pairs.append(pair)
        else:
            self.skipped += 1

    def digest(self) -> str:
        """The sha256 of all pairs, each side after its length."""
        return sha256_of_tokens(text.encode("utf-8") for pair in self.pairs for text in pair)

    def limited(self, limit_bytes: int) -> None:
        """Keep the first pairs, up to so many bytes of text."""
        total = 0
        for number, pair in enumerate(self.pairs):
            total += sum(len(text.encode("utf-8")) for text in pair)
            if total > limit_bytes:
                del self.pairs[number:]
                return


def _copies(count: int, seed: int = 0) -> list[Pair]:
    """Return `count` different rows of 4 to 10 letters, each its own translation."""
    state, drawn = np.random.RandomState(seed), {}
    while len(drawn) < count:
        letters = state.randint(10, size=state.randint(4, 11))
        drawn["".join(chr(ord("a") + letter) for letter in letters)] = None
    return [(text, text) for text in drawn]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        hint = "Name a file of `source TAB target` lines, two files with a comma between them, or: "
        hint += ", ".join(BUILT_IN) + "."
        raise Refusal("data.unreadable", f"{path} cannot be read: {error.strerror}.", hint=hint) from None
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 at byte {error.start}."
        raise Refusal("data.not_utf8", what, hint="Convert it to UTF-8 first.") from None
    # Not splitlines: it also cuts at signs that may stand inside a sentence, and the two files would part company.
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _read(source: str) -> _ParallelText:
    """Read or make the parallel text that a request names."""
    if source in BUILT_IN:
        made = _copies(BUILT_IN_PAIRS) if source == "copy" else english_german(BUILT_IN_PAIRS)
        return _ParallelText(source, made)
    text = _ParallelText("file")
    files = [Path(name).expanduser() for name in source.split(",")]
    if len(files) == 2:
        sides = [_lines(file) for file in files]
        if len(sides[0]) != len(sides[1]):
            counts = f"{files[0]} has {len(sides[0])} lines, {files[1]} has {len(sides[1])}"
            hint = "Line n of one must be the translation of line n of the other."
            raise Refusal("data.not_parallel", f"{counts}.", hint=hint)
        for pair in zip(*sides, strict=True):
            text.add(*pair)
        return text
    path = Path(source).expanduser()
    for number, line in enumerate(_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2 and line.strip():
            hint = "A line is a sentence, a tab, and its translation; or give two files with a comma between them."
            raise Refusal("data.not_parallel", f"Line {number} of {path} has {len(columns)} columns, not 2.", hint=hint)
        text.add(columns[0], columns[-1] if len(columns) == 2 else "")
    return text


def _is_held_out(source: str, fraction: float) -> bool:
    """Whether a source sentence is held out: by its digest, so that all its translations are on the same side."""
    number = int.from_bytes(hashlib.sha256(source.encode("utf-8")).digest()[:8], "big")
    return number < fraction * 2**64


def prepare_pairs(request: PairRequest, say: Say) -> dict[str, Any]:
    """Make `request.out` a data folder with a parallel text (docs/TRANSLATION.md) and return what it holds.

    The folder is there whole or not at all. Raises Refusal; other OSErrors come from writing.
    """
    text = _read(request.source)
    if request.limit_bytes:
        text.limited(request.limit_bytes)
    splits: dict[str, list[Pair]] = {"train": [], "val": []}
    for pair in text.pairs:
        splits["val" if _is_held_out(pair[0], request.val_fraction) else "train"].append(pair)
    tokenizer = PairTokenizer.for_pairs(request.tokenizer, splits["train"], request.vocab_limit)
    with staging(request.out) as folder:
        manifest = _write(request, text, splits, tokenizer, folder, say)
        write_prompts(folder, tokenizer, request.prompts, say, most=request.context - ENDS)
        sha256 = sha256_of_file(folder / "data.json")
        replace_folder(folder, request.out)
    key = hashlib.sha256(json.dumps([sha256, request.prompts]).encode()).hexdigest()[:32]
    return {
        "v": 1,
        "data": summary_of(manifest, request.out, sha256, request.source),
        "key": key,
        "cached": False,
        "skipped": {"without text on one side": text.skipped} if text.skipped else {},
    }


def _write(
    request: PairRequest,
    text: _ParallelText,
    splits: dict[str, list[Pair]],
    tokenizer: PairTokenizer,
    folder: Path,
    say: Say,
) -> dict[str, Any]:
    """Write shards, vocabulary and data.json; return what the last says."""
    entries: dict[str, list[dict[str, Any]]] = {}
    counts = {"train": 0, "val": 0, "too_long": 0, "longest": 0}
    for split, pairs in splits.items():
        with ShardWriter(folder, split) as writer:
            for row in _rows(tokenizer, pairs):
                # A source takes its start and end too, a target one of them at a time.
                longest = max(row.middle + 1, len(row.ids) - row.middle - 1)
                counts["too_long" if longest > request.context else split] += 1
                if longest <= request.context:
                    writer.write(row.ids)
                    counts["longest"] = max(counts["longest"], longest)
        entries[split] = writer.entries
        if not counts[split]:
            what = f"{request.source} gives no pair to {split}: {len(text.pairs)} pairs were read"
            what += f", {counts['too_long']} are longer than {request.context} tokens"
            hint = "Take more text, another val_fraction or a longer context."
            raise Refusal("data.too_small", f"{what}.", hint=hint)
        say(f"{split}: {counts[split]:,} pairs, {writer.tokens:,} tokens")
    if counts["too_long"]:
        say(f"{counts['too_long']:,} pairs are longer than {request.context} tokens and were left out")
    write_vocabulary(folder, tokenizer.name, tokenizer.tokens)
    size = sum(len(side.encode("utf-8")) for pair in text.pairs for side in pair)
    source = {"kind": text.kind, "digest": text.digest(), "documents": len(text.pairs), "bytes": size}
    pairs = {"pad_id": PAD_ID, "start_id": START_ID, "end_id": END_ID, **counts}
    manifest = manifest_of(tokenizer, source, entries, pairs=pairs)
    write_json(folder / "data.json", manifest)
    return manifest


@dataclass(frozen=True)
class _Row:
    """A pair's tokens, and where its source ends."""

    ids: np.ndarray
    middle: int


def _rows(tokenizer: PairTokenizer, pairs: Sequence[Pair]) -> Iterator[_Row]:
    start, end = (np.array([token], dtype=np.uint16) for token in (START_ID, END_ID))
    for pair in pairs:
        source, target = tokenizer.encode(pair)
        yield _Row(np.concatenate([start, source, end, target, end]), len(source) + 1)
