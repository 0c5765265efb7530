"""The data of a plan that nothing is prepared for: how much would have to travel, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.model import digest_of
from gpurun.core.plan import DataSummary, Request
from gpurun.lifecycle.corpus.shards import BUILT_IN, demand_made_for, read_manifest
from gpurun.planning.load import BUCKET_BITS_PER_S, WORTH_A_BUCKET_S, Load, load_of
from gpurun.planning.recipe import ResolvedRecipe
from gpurun.view.quantities import format_bytes, format_duration

__all__ = ["load_for", "named_data", "not_prepared", "vocabulary_of"]

BYTES_PER_TOKEN = 2
VOCABULARIES = {"gpt2": 50257, "bpe": 8192, "char": 128, "char-pairs": 128, "word-pairs": 32_000}
DEFAULT_TEXT_MB = 32
SOURCE_TOKENS = {
    "corpus-12gb": 3_000_000_000,
    "fineweb-100b": 100_000_000_000,
    "fineweb-edu-10b": 10_000_000_000,
    "openwebtext": 9_040_000_000,
    "tiny-shakespeare": 1_120_000,
    "wikitext-2": 2_600_000,
}
"""The tokens of what the bundled recipes read, at most: training may read them more than once."""


def load_for(request: Request, full: ResolvedRecipe, data: DataSummary | None) -> tuple[Load, tuple[str, ...]]:
    """What a paid run would move, and what should be said of that.

    Without `data`, shards that do not exist yet are counted from a bucket: a home line would be the whole bill.
    """
    source, carried = full.tables.data.source, full.earlier.bytes if full.earlier else 0
    if data is not None:
        load = load_of(full, data.bytes, vocab_size=data.vocab_size)
        return _staged(load, Path(data.folder), request), ()
    if request.data is not None or source in BUILT_IN:
        size, shards = _size_at(request.data, full) if request.data is not None else (_text_bytes(None, full), None)
        return _staged(load_of(full, carried + size, vocab_size=vocabulary_of(full)), shards, request), ()
    size = carried + _tokens_of(full) * BYTES_PER_TOKEN
    plain = load_of(full, size, vocab_size=vocabulary_of(full))
    load = replace(plain, uplink_bits_per_s=BUCKET_BITS_PER_S)
    note = f"The shards of {source} (about {format_bytes(size)}) are not here yet."
    if plain.ship_s - load.ship_s < WORTH_A_BUCKET_S:
        return plain, (note,)
    return load, (f"{note} They are counted as pulled from a bucket in {format_duration(load.ship_s)}.",)


def not_prepared(request: Request, full: ResolvedRecipe, size: int) -> DataSummary:
    """Data that is only spoken of; of shards that were brought, what their manifest says."""
    data = full.tables.data
    source, train_tokens = f"{data.source} (not prepared)", _tokens_of(full)
    if request.data is not None:
        place = Path(request.data).expanduser()
        shards = _shards_for(full, place) if (place / "data.json").exists() else []
        state = "not checked" if shards else "not prepared"
        source, train_tokens = f"{request.data} ({state})", sum(shard["tokens"] for shard in shards)
    return DataSummary(
        folder="",
        tokenizer=data.tokenizer,
        tokenizer_sha256="",
        vocab_size=vocabulary_of(full),
        train_tokens=train_tokens,
        val_tokens=0,
        bytes=size,
        sha256="",
        source=source,
    )


def _shards_for(full: ResolvedRecipe, folder: Path) -> list[Mapping[str, Any]]:
    """What the manifest lists for training; shards of another tokeniser or model are refused, as `train` does."""
    manifest, model = read_manifest(folder), full.tables.model
    tokenizer = full.tables.data.tokenizer
    demand_made_for(folder, manifest, tokenizer=tokenizer, vocab_size=model.vocab_size, context=model.context)
    return list(manifest["train"])


def named_data(request: Request) -> str:
    """What an earlier run on the data that --data names knows it by: "" where none is named, of a text what no run has.

    Nothing is said of losses that were measured on something else.
    """
    if request.data is None:
        return ""
    place = Path(request.data).expanduser()
    return digest_of(read_manifest(place)) if (place / "data.json").exists() else "not prepared"


def vocabulary_of(full: ResolvedRecipe) -> int:
    """The recipe's vocabulary; where only the text will tell, what Python source gives, or the most words there are."""
    data = full.tables.data
    return full.tables.model.vocab_size or data.vocab_size or VOCABULARIES[data.tokenizer]


def _tokens_of(full: ResolvedRecipe) -> int:
    """The tokens of shards that are not there: as many as training reads, unless the source is known to have fewer."""
    train = full.tables.train
    read = train.steps * train.batch_tokens
    return min(read, SOURCE_TOKENS.get(full.tables.data.source, read))


def _staged(load: Load, shards: Path | None, request: Request) -> Load:
    """The load, by the bucket where one was named; `shards` is the folder that has them, if one has."""
    if not request.choices.stage or not load.ship_bytes:
        return load
    from gpurun.lifecycle.bucket.planned import staged_uplink_bits_per_s

    if shards is None:
        return replace(load, uplink_bits_per_s=BUCKET_BITS_PER_S)
    return replace(load, uplink_bits_per_s=staged_uplink_bits_per_s(shards, load.ship_bytes))


def _size_at(data: str, full: ResolvedRecipe) -> tuple[int, Path | None]:
    """How much would travel of what --data names, and the folder of shards, if that is what it is.

    Of a parallel text that may be two files with a comma between.
    """
    places = [Path(data).expanduser()]
    if not places[0].exists():
        places = [Path(one).expanduser() for one in data.split(",")]
    for place in places:
        if not place.exists():
            raise UsageError("data.missing", f"{place} is not there.", hint="Check the path that --data names.")
    files = [path for place in places for path in [place, *place.rglob("*")] if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return (size, places[0]) if (places[0] / "data.json").exists() else (_text_bytes(size, full), None)


def _text_bytes(size: int | None, full: ResolvedRecipe) -> int:
    """What the shards of so much text take at most: two bytes a character, or fewer than the text in longer tokens."""
    data = full.tables.data
    limit = data.limit_mb << 20 or (size if size is not None else DEFAULT_TEXT_MB << 20)
    text = limit if size is None else min(size, limit)
    return text * BYTES_PER_TOKEN if data.tokenizer in ("char", "char-pairs") else text
