"""What data.json says of shards (docs/FORMATS.md), and what is said of it to whoever asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from trainer.prepare.tokenizers import sha256_of_tokens

__all__ = ["Described", "manifest_of", "summary_of"]

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
