"""From a request to a finished data folder: look in the cache, else tokenise, then tokenise the prompts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import Refused
from trainer.items import FILE, read_items
from trainer.prepare.bpe import train_bpe
from trainer.prepare.corpus import Corpus, Part, hold_out, open_corpus, pieces, read_text
from trainer.prepare.errors import Refusal
from trainer.prepare.folders import locked, replace_folder, staging
from trainer.prepare.listing import STDLIB, tally
from trainer.prepare.manifest import manifest_of, summary_of
from trainer.prepare.pairs.tokenizers import ENDS, TOKENIZERS, PairTokenizer
from trainer.prepare.shards import (
    ShardWriter,
    read_vocabulary,
    sha256_of_file,
    write_json,
    write_prompts,
    write_vocabulary,
)
from trainer.prepare.tokenizers import (
    REPLACEMENT,
    BpeTokenizer,
    CharTokenizer,
    Tokenizer,
    count_characters,
    load_gpt2,
    sha256_of_tokens,
    tokenizer_of,
)
from trainer.shards import open_data, windows_in

__all__ = ["Request", "accompany", "prepare", "reopen"]

FORMAT = 2
"""Counts up whenever the same text would be prepared into other bytes, so that no older cache entry is taken."""
_BATCH_CHARS = 8 << 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to prepare; `limit_bytes` and `vocab_limit` of 0 mean all and the tokeniser's own choice."""

    source: str
    tokenizer: str
    val_fraction: float
    prompts: tuple[str, ...]
    out: Path
    cache: Path | None = None
    limit_bytes: int = 0
    vocab_limit: int = 0
    min_tokens: int = 65


def prepare(request: Request, say: Say) -> dict[str, Any]:
    """Make `request.out` a data folder (docs/FORMATS.md) and return what it holds.

    The folder is there whole or not at all. With a cache, the same text, tokeniser and limits are tokenised once; its
    entries are verified by digest before they are used. Raises Refusal; other OSErrors come from writing.
    """
    corpus = open_corpus(request.source, request.limit_bytes)
    key = _key_of(request, corpus)
    say(f"{len(corpus.documents)} documents, {corpus.bytes / 1e6:.1f} MB of text")
    if corpus.skipped and corpus.kind != STDLIB:
        say(f"passed over: {tally(corpus.skipped)}")
    with staging(request.out) as folder:
        if request.cache is None:
            cached = False
            _tokenise(request, corpus, folder, say)
        else:
            with locked(request.cache, say):
                entry = request.cache / key
                cached = _is_sound(entry, say)
                if not cached:
                    with staging(entry) as fresh:
                        _tokenise(request, corpus, fresh, say)
                        fresh.rename(entry)
                for file in sorted(entry.iterdir()):
                    shutil.copyfile(file, folder / file.name)
        manifest = json.loads((folder / "data.json").read_bytes())
        write_prompts(folder, reopen(manifest["tokenizer"]["name"], folder), request.prompts, say)
        source = STDLIB if corpus.kind == STDLIB else request.source
        result = summary_of(manifest, request.out, sha256_of_file(folder / "data.json"), source)
        replace_folder(folder, request.out)
    return {"v": 1, "data": result, "key": key, "cached": cached, "skipped": corpus.skipped}


def accompany(
    shards: Path, prompts: tuple[str, ...], out: Path, say: Say, *, context: int, items: int = 0
) -> dict[str, Any]:
    """Make a folder with what shards that exist already need beside them: data.json, vocab.json and prompts.json.

    HellaSwag's come with them where there are some, of which so many `items` will be read. The shards themselves stay
    where they are. Raises Refusal when their tokeniser is neither GPT-2's nor in the folder, and for all that the
    trainer would refuse.
    """
    manifest = json.loads((shards / "data.json").read_bytes())
    made_by = manifest["tokenizer"]
    with staging(out) as folder:
        shutil.copyfile(shards / "data.json", folder / "data.json")
        tokens: Sequence[bytes]
        if (shards / "vocab.json").exists():
            tokens = read_vocabulary(shards)
            shutil.copyfile(shards / "vocab.json", folder / "vocab.json")
        elif made_by["name"] == "gpt2":
            tokens = load_gpt2(say).tokens
            write_vocabulary(folder, "gpt2", tokens)
        else:
            raise Refusal(
                "data.no_vocabulary",
                f"{shards} has no vocab.json, and only GPT-2's vocabulary is known without one.",
                hint="Copy the vocab.json from where the shards were made.",
            )
        if sha256_of_tokens(tokens) != made_by["sha256"]:
            raise Refusal(
                "data.other_tokenizer",
                f"The vocabulary in {shards} is not the one that its data.json names.",
                hint="Prepare the text again, or copy vocab.json from where the shards were made.",
            )
        if (shards / FILE).exists():
            shutil.copyfile(shards / FILE, folder / FILE)
        most = context - ENDS if "pairs" in manifest else None
        write_prompts(folder, reopen(made_by["name"], folder), prompts, say, most=most)
        _demand_trainable(folder, shards, manifest, prompts, context)
        if (folder / FILE).exists():
            _demand_items(folder, shards, items, made_by["vocab_size"])
        replace_folder(folder, out)
    return {"v": 1, "folder": str(out)}


def _demand_trainable(
    folder: Path, shards: Path, manifest: dict[str, Any], prompts: tuple[str, ...], context: int
) -> None:
    """Open the data as the trainer will, here, where a refusal costs nothing."""
    try:
        data = open_data(folder, manifest["tokenizer"]["name"], prompts, shards_in=shards)
        if "pairs" not in manifest:
            for part, name in ((data.train, "train"), (data.val, "val")):
                windows_in(sum(shard.tokens for shard in part), context, name)
    except Refused as refused:
        hint = "Prepare the text again for this recipe; docs/FORMATS.md has the form of shards made elsewhere."
        raise Refusal("data.untrainable", f"The trainer would not take {shards}: {refused}.", hint=hint) from None


def _demand_items(folder: Path, shards: Path, items: int, vocab_size: int) -> None:
    """Read HellaSwag's items as the trainer will."""
    try:
        read_items(folder, items, vocab_size)
    except Refused as refused:
        hint = "Make it again: gpurun data hellaswag hellaswag_val.jsonl DIR; or --set eval.hellaswag_items=0."
        raise Refusal("data.untrainable", f"The trainer would not take {shards}: {refused}.", hint=hint) from None


def _key_of(request: Request, corpus: Corpus) -> str:
    """Names everything that the tokenised bytes depend on."""
    parts = [FORMAT, corpus.kind, corpus.digest, request.tokenizer, request.val_fraction, request.vocab_limit]
    return hashlib.sha256(json.dumps([*parts, request.min_tokens]).encode()).hexdigest()[:32]


def _tokenise(request: Request, corpus: Corpus, folder: Path, say: Say) -> None:
    """Write the shards, the vocabulary and data.json into an empty folder."""
    train, val = hold_out(corpus, request.val_fraction)
    tokenizer = _open_tokenizer(request, corpus, say)
    entries: dict[str, list[dict[str, Any]]] = {}
    for split, parts in (("train", train), ("val", val)):
        with ShardWriter(folder, split) as writer:
            for ids in _encoded(tokenizer, parts, say if split == "train" else lambda _: None):
                writer.write(ids)
        entries[split] = writer.entries
        if writer.tokens < request.min_tokens:
            raise Refusal(
                "data.too_small",
                f"{request.source} gives {writer.tokens} tokens to {split}; at least {request.min_tokens} are needed.",
                hint="Take a longer text, another val_fraction, or a shorter context.",
            )
        say(f"{split}: {writer.tokens:,} tokens")
    write_vocabulary(folder, tokenizer.name, tokenizer.tokens)
    source = {"kind": corpus.kind, "digest": corpus.digest, "documents": len(corpus.documents), "bytes": corpus.bytes}
    write_json(folder / "data.json", manifest_of(tokenizer, source, entries))


def _open_tokenizer(request: Request, corpus: Corpus, say: Say) -> Tokenizer:
    """GPT-2's tokeniser, or one that is trained on this corpus, or its characters."""
    if request.tokenizer == "gpt2":
        return load_gpt2(say)
    if request.tokenizer == "bpe":
        train, _ = hold_out(corpus, request.val_fraction)
        texts = (read_text(part.document)[part.start : part.stop] for part in train)
        tokenizer = BpeTokenizer(train_bpe(texts, request.vocab_limit))
        say(f"{len(tokenizer.tokens):,} tokens trained on the text")
        return tokenizer
    counts = count_characters(read_text(document) for document in corpus.documents)
    tokenizer = CharTokenizer.for_counts(counts, request.vocab_limit)
    known = [ord(token.decode("utf-8")) for token in tokenizer.tokens]
    lost = 1.0 - counts[known].sum() / counts.sum()
    say(f"{len(known)} characters; {lost:.2%} of the text is written as {REPLACEMENT!a}")
    return tokenizer


def reopen(name: str, folder: Path) -> Tokenizer:
    """The tokeniser that a finished folder was made with, from its vocabulary alone."""
    tokens = read_vocabulary(folder)
    if name in TOKENIZERS:
        return PairTokenizer.from_tokens(name, tokens)
    return tokenizer_of(name, tokens)


def _encoded(tokenizer: Tokenizer, parts: Iterable[Part], say: Say) -> Iterator[np.ndarray]:
    """The tokens of the parts in order, each document after the end-of-text token where the tokeniser has one."""
    before = [] if tokenizer.eot_id is None else [np.array([tokenizer.eot_id], dtype=np.uint16)]
    done = 0
    for batch in _batches(parts):
        rows = tokenizer.encode([text for text, _ in batch])
        for (text, starts), row in zip(batch, rows, strict=True):
            yield from before if starts else []
            yield row
            done += len(text)
        say(f"tokenised {done / 1e6:.1f} M characters")


def _batches(parts: Iterable[Part]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of text with whether they start a document, some megabytes at a time."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for part in parts:
        for number, piece in enumerate(pieces(read_text(part.document)[part.start : part.stop])):
            batch.append((piece, number == 0))
            size += len(piece)
            if size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _is_sound(entry: Path, say: Say) -> bool:
    """Whether a cache entry exists and every file in it is what its manifest says; a damaged one is removed."""
    if not entry.is_dir():
        return False
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, Refusal):
        manifest = json.loads((entry / "data.json").read_bytes())
        files = [*manifest["train"], *manifest["val"]]
        whole = all(sha256_of_file(entry / file["name"]) == file["sha256"] for file in files)
        if whole and sha256_of_tokens(read_vocabulary(entry)) == manifest["tokenizer"]["sha256"]:
            return True
    say(f"the cache entry {entry.name} is damaged; it is made again")
    shutil.rmtree(entry)
    return False
