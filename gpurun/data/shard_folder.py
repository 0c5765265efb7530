"""Reads a folder of shards: its data.json, and a check of every shard against it, token by token (docs/FORMATS.md)."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import page
from gpurun.core.records import digest_json
from gpurun.core.run_plan import DataSummary
from gpurun.core.untrusted import read_object
from gpurun.data.foreign_shards import OWN, refuse_foreign
from gpurun.data.npy import npy_row
from gpurun.data.refusals import reading

HEADER_BYTES = 1024
MAGIC = 20240520
_BLOCK_BYTES = 16 << 20


def refuse_undescribed_shards(folder: Path) -> None:
    """Raise UsageError for shards without a data.json, or a folder that contains such shards; they are not text.

    A folder with a data.json, a text, and a missing path are accepted here, and checked elsewhere.
    """
    if not folder.exists() or (folder / "data.json").exists():
        return
    if (folder / "prepare.json").is_file():
        raise UsageError(
            "data.unfinished",
            f"{folder} contains an unfinished prepare.",
            hint="Run the same `gpurun data prepare` again to resume it.",
        )
    if (folder / "vocab.json").is_file() and any(folder.glob("*.bin")):
        raise UsageError(
            "data.no_manifest",
            f"{folder} holds shards and a vocabulary, but no data.json that describes them.",
            hint="Copy data.json from where the shards were made, or prepare the data again.",
        )
    with reading(folder):
        for below in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (below / "vocab.json").is_file() and any((below / name).is_file() for name in OWN):
                what = f"{below} is a folder of shards, but {folder} would be read as text."
                raise UsageError("data.shards_below", what, hint=f"Name the shards themselves: --data {below}")
    refuse_foreign(folder)


def inspect_data(folder: Path) -> tuple[DataSummary, dict[str, Any]]:
    """Check every byte of a folder of shards; return its summary and manifest. UsageError for any fault."""
    refuse_undescribed_shards(folder)
    manifest = read_manifest(folder)
    found = inspect(folder, tokenizer=manifest["tokenizer"]["name"], vocab_size=0)
    _check_vocabulary(folder, found.tokenizer_sha256)
    return found, manifest


def inspect(folder: Path, *, tokenizer: str, vocab_size: int, context: int = 0) -> DataSummary:
    """Check a folder of shards against its manifest: sizes, magic numbers, digests, every token id.

    `vocab_size` and `context` are the model's; 0 means that there is no limit. Only sentence pairs must fit into the
    context.
    """
    manifest = read_manifest(folder)
    require_fitting_shards(folder, manifest, tokenizer=tokenizer, vocab_size=vocab_size, context=context)
    made_by = manifest["tokenizer"]
    sizes = [
        _check_shard(folder, shard, made_by["vocab_size"]) for part in ("train", "val") for shard in manifest[part]
    ]
    return DataSummary(
        folder=str(folder.absolute()),
        tokenizer=made_by["name"],
        tokenizer_sha256=made_by["sha256"],
        vocab_size=made_by["vocab_size"],
        train_tokens=sum(shard["tokens"] for shard in manifest["train"]),
        val_tokens=sum(shard["tokens"] for shard in manifest["val"]),
        bytes=sum(sizes),
        sha256=digest_json(manifest),
        source=str(manifest["source"].get("kind", "shards")),
    )


def require_fitting_shards(
    folder: Path, manifest: Mapping[str, Any], *, tokenizer: str, vocab_size: int, context: int = 0
) -> None:
    """Raise UsageError if shards were made with another tokeniser, or do not fit the model; see `inspect`."""
    made_by = manifest["tokenizer"]
    if made_by["name"] != tokenizer:
        raise UsageError(
            "data.other_tokenizer",
            f"{folder} was tokenised with {made_by['name']!r}; the recipe uses {tokenizer!r}.",
            hint="Prepare the text again with the recipe's tokeniser, or choose the recipe that fits the shards.",
        )
    longest = manifest.get("pairs", {}).get("longest", 0)
    if 0 < context < longest:
        raise UsageError(
            "data.pair_too_long",
            f"{folder} has a sentence of {longest} positions; model.context is {context}.",
            hint=f"Prepare the text again for this context, or add --set context={longest}.",
        )
    tokens = made_by["vocab_size"]
    if 0 < vocab_size < tokens:
        raise UsageError(
            "data.vocabulary_larger",
            f"model.vocab_size is {vocab_size}, but the tokeniser {tokenizer!r} of the data has {tokens} tokens.",
            hint=f"Use the tokeniser's number with --set model.vocab_size=0, or set at least {tokens}.",
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of `data.json`; UsageError, with the reason, if it is invalid."""
    try:
        manifest = read_object(folder / "data.json")
        of_shards = {"name": str, "tokens": int, "sha256": str}
        for table in (*manifest["train"], *manifest["val"]):
            _demand_types(table, of_shards)
        _demand_types(manifest["tokenizer"], {"name": str, "sha256": str, "vocab_size": int})
        _demand_types(manifest, {"source": dict})
        if not manifest["train"]:
            raise KeyError("train")
        json.dumps(manifest, ensure_ascii=False).encode()  # JSON can contain a lone surrogate, UTF-8 cannot.
    except OSError as error:
        raise UsageError("data.unreadable", f"{folder}/data.json cannot be read: {error.strerror}.",
                         hint="Check the path and its permissions.") from None  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("data.bad_manifest", f"{folder}/data.json is not a manifest of shards: {error!r}.",
                         hint=f"Prepare the data again; {page('FORMATS.md')} has the format.") from None  # fmt: skip
    return manifest


def _demand_types(table: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Raise KeyError or TypeError, naming the key, if a key of the manifest is missing or has the wrong type."""
    for key, kind in types.items():
        if type(table[key]) is not kind:
            raise TypeError(f"{key} is {json.dumps(table[key])[:80]}")


def _check_shard(folder: Path, shard: Mapping[str, Any], vocab_size: int) -> int:
    """Check a shard's header, length, digest and token ids, and return its size in bytes."""
    import numpy as np

    path = folder / Path(str(shard["name"])).name
    if not path.is_file():
        raise _shard_error(path, "missing", "is listed in data.json but does not exist")
    size = path.stat().st_size
    # nanoGPT's shards have no header: the size alone identifies them.
    header_bytes = 0 if path.suffix == ".npy" or size == 2 * shard["tokens"] else HEADER_BYTES
    if shard["tokens"] < 1 or size in (0, header_bytes):
        raise _shard_error(path, "empty", "holds no tokens")
    digest = hashlib.sha256()
    highest = _find_highest_of_npy(path, shard["tokens"]) if path.suffix == ".npy" else 0
    if size != shard.get("bytes", size):
        raise _shard_error(path, "truncated", f"has {size} bytes, but data.json says {shard['bytes']}")
    with path.open("rb") as content:
        head = content.read(header_bytes)
        digest.update(head)
        if header_bytes and head[:4] != MAGIC.to_bytes(4, "little"):
            raise _shard_error(path, "magic", "does not begin like an llm.c shard")
        if path.suffix == ".bin" and size != header_bytes + 2 * shard["tokens"]:
            raise _shard_error(path, "truncated", f"has {size} bytes, which does not match {shard['tokens']} tokens")
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
            if path.suffix == ".bin":
                highest = max(highest, int(np.frombuffer(block, "<u2").max()))
    if highest >= vocab_size:
        raise _shard_error(path, "token_too_high", f"has the token {highest}; the highest allowed is {vocab_size - 1}")
    if digest.hexdigest() != shard["sha256"]:
        raise _shard_error(path, "digest", "does not have the sha256 in data.json")
    return size


def _find_highest_of_npy(path: Path, tokens: int) -> int:
    """Return the highest token id of a .npy shard, which must be one row of `tokens` uint16."""
    import numpy as np

    try:
        row = npy_row(path)
    except (ValueError, OSError) as error:
        raise _shard_error(path, "npy", f"is not a valid .npy file: {error}") from None
    if row.dtype != np.dtype("<u2") or row.shape != (tokens,):
        raise _shard_error(path, "npy", f"holds {row.dtype} of shape {row.shape}, not one row of {tokens} uint16")
    return int(row.max())


def _shard_error(path: Path, code: str, what: str) -> UsageError:
    """Return the error for a shard; the error names an adopted shard by its original path."""
    is_adopted = path.is_symlink()
    hint = f"{'Adopt' if is_adopted else 'Prepare'} the data again, or copy it again from its source."
    return UsageError(f"data.{code}", f"{path.readlink() if is_adopted else path} {what}.", hint=hint)


def _check_vocabulary(folder: Path, sha256: str) -> None:
    """Check vocab.json, if it exists, against the tokeniser that data.json names."""
    path = folder / "vocab.json"
    if not path.exists():
        return
    digest = hashlib.sha256()
    try:
        for token in read_object(path)["tokens_b64"]:
            raw = base64.b64decode(token)
            digest.update(struct.pack("<I", len(raw)) + raw)
        same = digest.hexdigest() == sha256
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise UsageError(
            "data.other_tokenizer",
            f"{path} is not the vocabulary that data.json names.",
            hint="Prepare the data again, or copy vocab.json from the folder where the shards were made.",
        )
