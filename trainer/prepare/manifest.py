"""What data.json says of shards (docs/FORMATS.md), and what is said of it to the caller."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.prepare.shards import sync_folder, write_json
from trainer.prepare.tokenizers import sha256_of_tokens

__all__ = ["Described", "finish_folder", "manifest_of", "summary_of"]

Entries = dict[str, list[dict[str, Any]]]


class Described(Protocol):
    """What the manifest says of a tokeniser."""

    name: str
    tokens: tuple[bytes, ...]
    eot_id: int | None


def manifest_of(tokenizer: Described, source: dict[str, Any], entries: Entries, **more: Any) -> dict[str, Any]:
    """The content of data.json: the tokeniser, where the text came from, every file by split, and `more`."""
    identity = {"name": tokenizer.name, "sha256": sha256_of_tokens(tokenizer.tokens)}
    return {
        "v": 1,
        "dtype": "uint16",
        "eot": "none" if tokenizer.eot_id is None else "before",
        "tokenizer": {**identity, "vocab_size": len(tokenizer.tokens), "eot_id": tokenizer.eot_id},
        "source": source,
        **more,
        **entries,
    }


def finish_folder(
    folder: Path, tokenizer: Described, records: Sequence[dict[str, Any]], about: dict[str, Any]
) -> dict[str, Any]:
    """Write data.json over the shards of these tasks, in their order, which ends their folder; return its content.

    `about` is what is said of the source besides what the records tell.
    """
    entries = {split: [entry for record in records for entry in record[split]] for split in ("train", "val")}
    sums = {name: sum(record[name] for record in records) for name in ("documents", "dropped", "bytes")}
    digest = hashlib.sha256("".join(record["digest"] for record in records).encode()).hexdigest()
    manifest = manifest_of(tokenizer, {**about, "digest": digest, **sums}, entries)
    write_json(folder / ".data.json", manifest)
    os.rename(folder / ".data.json", folder / "data.json")
    sync_folder(folder)
    return manifest


def summary_of(manifest: dict[str, Any], folder: Path, sha256: str, source: str) -> dict[str, Any]:
    """What a folder holds, in the words of the laptop's `DataSummary`; `sha256` is that of data.json."""
    tokenizer, shards = manifest["tokenizer"], [*manifest["train"], *manifest["val"]]
    tokens = {split: sum(shard["tokens"] for shard in manifest[split]) for split in ("train", "val")}
    return {
        "folder": str(folder),
        "tokenizer": tokenizer["name"],
        "tokenizer_sha256": tokenizer["sha256"],
        "vocab_size": tokenizer["vocab_size"],
        "train_tokens": tokens["train"],
        "val_tokens": tokens["val"],
        "bytes": sum(shard["bytes"] for shard in shards),
        "sha256": sha256,
        "source": source,
    }
