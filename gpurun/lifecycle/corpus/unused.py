"""What is asked of text, where finished shards are brought: it cannot act on them any more, and that is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpurun.core.plan import Request
from gpurun.lifecycle.corpus.shards import read_manifest
from gpurun.planning.overrides import parse_override
from gpurun.planning.recipe import Recipe

__all__ = ["unused_notes"]

_NEAR = 0.25
"""How far the share that is held out may lie from what was asked for: whole documents are."""


def unused_notes(request: Request, recipe: Recipe, told: Mapping[str, Any]) -> tuple[str, ...]:
    """A note on the `data` keys, as resolved, that a person named and that brought shards were not made by.

    What a recipe's rehearsal says to be quick is no wish, and a run that goes on has its own shards.
    """
    if request.data is None or request.continues or not (Path(request.data).expanduser() / "data.json").exists():
        return ()
    manifest = read_manifest(Path(request.data).expanduser())
    train, val = (sum(shard["tokens"] for shard in manifest[part]) for part in ("train", "val"))
    share, vocab_size = val / max(1, train + val), manifest["tokenizer"]["vocab_size"]
    holds = {
        "limit_mb": not told["limit_mb"],
        "val_fraction": abs(share - told["val_fraction"]) <= _NEAR * told["val_fraction"],
        "vocab_size": told["vocab_size"] in (0, vocab_size),
    }
    named = {key: getattr(recipe.tables.data, key) for key in recipe.tables.data.model_fields_set}
    named |= {path[-1]: value for path, value in map(parse_override, request.overrides) if path[-2] == "data"}
    unused = [f"data.{key} {told[key]}" for key, held in holds.items() if not held and named.get(key) == told[key]]
    if not unused:
        return ()
    what = f"{request.data} holds finished shards ({share:.1%} held out, a vocabulary of {vocab_size:,})"
    return (f"{what}: {' and '.join(unused)} cannot act on them, only on text.",)
