"""Implements `gpurun data adopt`: makes a data folder that links to another program's shards (docs/DATA.md)."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.run_plan import DataSummary
from gpurun.data.foreign_shards import META, foreign_shards, foreign_shards_error, split_of
from gpurun.data.nanogpt_meta import characters_of
from gpurun.data.npy import npy_row
from gpurun.data.refusals import Say, translate_refusals
from gpurun.data.shard_folder import HEADER_BYTES, inspect_data

TOKENIZERS = ("gpt2", "char")
ENDS = ("before", "after", "none")


def adopt(folder: Path, tokenizer: str, out: Path, say: Say, *, eot: str = "") -> tuple[DataSummary, dict[str, Any]]:
    """Create the folder `out` with data.json, vocab.json, and a link to each shard of `folder`; nothing is copied.

    `eot` is the position of the end-of-text token; "" means the position that the shards' maker uses. Return the
    summary and the manifest, with every byte checked. UsageError for anything that the trainer would refuse; then
    `out` is removed.
    """
    found = _find_shards(folder)
    maker = next(iter(found.values()))
    vocabulary = _load_named_tokenizer(folder, tokenizer, maker, say)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError("data.out_in_use", f"{out} exists already.", hint="Name a new folder with --out.")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
        what = f"{out} is inside {folder}, where gpurun writes nothing."
        raise UsageError("data.out_in_source", what, hint="Name a folder outside it with --out.")
    say(f"reading {len(found):,} shards of {maker}, {sum(path.stat().st_size for path in found) / 1e9:,.2f} GB")
    try:
        with translate_refusals("Nothing was left behind."):
            out.mkdir(parents=True, exist_ok=True)
            entries = {split: _link_shards(found, split, out) for split in ("train", "val")}
            digests = [entry["sha256"] for split in entries.values() for entry in split]
            if len(set(digests)) < len(digests):
                raise _same_shard_error(out, [entry for split in entries.values() for entry in split])
            source = {"kind": maker, "digest": hashlib.sha256("".join(digests).encode()).hexdigest()}
            name, tokens, eot_id = vocabulary.name, vocabulary.tokens, vocabulary.eot_id
            manifest = shard_files.manifest_of(name, tokens, eot_id, source, entries)
            manifest["eot"] = eot or _choose_eot_position(
                maker, eot_id, [path for path in found if split_of(path) == "train"]
            )
            shard_files.write_json(out / "vocab.json", tokenizers.vocabulary_json(name, tokens))
            shard_files.write_json(out / "data.json", manifest)
            return inspect_data(out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _find_shards(folder: Path) -> dict[Path, str]:
    """Return the shards in a folder, with the maker of each.

    UsageError if there are none, if they have different makers, or if a shard's split is unclear or a split is missing.
    """
    if not folder.is_dir():
        raise UsageError("data.missing", f"There is no folder {folder}.", hint="Name the folder with the shards.")
    found = foreign_shards(folder)
    makers = sorted(set(found.values()))
    for maker in makers:
        if "uint32" in maker or (folder / "data.json").is_file():
            raise foreign_shards_error(folder, maker)
    if len(makers) != 1:
        what = f"{folder} has shards of {' and of '.join(makers)}." if makers else f"{folder} has no known shards."
        hint = "gpurun knows nanoGPT's train.bin and val.bin, and llm.c's .bin or .npy with train or val in the name."
        raise UsageError("data.no_foreign_shards", what, hint=f"{hint} Name a folder with the shards of one program.")
    for path in found:
        if not split_of(path):
            hint = "Rename it to contain one of them, or remove it from the folder."
            raise UsageError("data.no_split", f"The name of {path} contains neither train nor val, or both.", hint=hint)
    if missing := {"train", "val"} - {split_of(path) for path in found}:
        what = f"{folder} has no shard with {missing.pop()} in its name; both are needed, to train and to evaluate on."
        hint = "Make the shards again with held-out data; or, if there are several, rename one of them."
        raise UsageError("data.no_held_out", what, hint=hint)
    return found


def _load_named_tokenizer(folder: Path, tokenizer: str, maker: str, say: Say) -> tokenizers.TextTokenizer:
    """Return the named tokeniser; UsageError if the files beside the shards show that another tokeniser was used."""
    is_char = maker == "nanoGPT" and (folder / META).is_file()
    if is_char != (tokenizer == "char"):
        fact = f"{folder} has {'a' if is_char else 'no'} {META}, where nanoGPT keeps its characters"
        hint = f"Use --tokenizer {'char' if is_char else 'gpt2'}."
        raise UsageError("data.other_tokenizer", f"{fact}, but --tokenizer is {tokenizer}.", hint=hint)
    return tokenizers.CharTokenizer(characters_of(folder / META)) if is_char else tokenizers.load_gpt2(say)


def _link_shards(found: Mapping[Path, str], split: str, out: Path) -> list[dict[str, Any]]:
    """Link a split's shards into `out` under gpurun's own names; return their entries for data.json."""
    entries: list[dict[str, Any]] = []
    for path in (path for path in found if split_of(path) == split):
        link = out / f"{split}_{len(entries) + (split == 'train'):06d}{path.suffix}"
        link.symlink_to(path.absolute())
        size, tokens = path.stat().st_size, _read_declared_tokens(path, found[path])
        digest = shard_files.sha256_of_file(path)
        entries.append({"name": link.name, "tokens": tokens, "bytes": size, "sha256": digest})
    return entries


def _same_shard_error(out: Path, entries: Sequence[Mapping[str, Any]]) -> UsageError:
    """Return the error for two identical shards: the run would train twice on the same data, or on held-out data."""
    first: dict[str, str] = {}
    again = next(entry for entry in entries if first.setdefault(entry["sha256"], entry["name"]) != entry["name"])
    places = [(out / name).readlink() for name in (first[again["sha256"]], again["name"])]
    what = f"{places[0]} and {places[1].name} hold the same tokens."
    return UsageError("data.same_shard", what, hint="Remove one of them; held-out data must not be trained on.")


def _read_declared_tokens(path: Path, maker: str) -> int:
    """Return the number of tokens that a shard declares; inspect_data checks that it contains them."""
    import numpy as np

    if maker == "nanoGPT":
        if path.stat().st_size % 2:
            what = f"{path} has an odd number of bytes, but a token has two."
            raise UsageError("data.truncated", what, hint="Copy it again from its source.")
        return path.stat().st_size // 2
    if maker == "npy":
        try:
            row = npy_row(path)
        except (ValueError, OSError) as error:
            hint = "Copy it again from its source."
            raise UsageError("data.npy", f"{path} is not a valid .npy file: {error}.", hint=hint) from None
        if row.dtype != np.dtype("<u2") or row.ndim != 1:
            what = f"{path} holds {row.dtype} of shape {row.shape}, not one row of uint16."
            raise UsageError("data.npy", what, hint="Write it with numpy.save(FILE, tokens.astype(numpy.uint16)).")
        return len(row)
    header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    if len(header) < HEADER_BYTES // 4 or header[1] != 1:
        what = f"{path} is not a shard in version 1 of llm.c's format."
        raise UsageError("data.magic", what, hint="Copy it again from its source, or make it again.")
    return int(header[2])


def _choose_eot_position(maker: str, eot_id: int | None, train: list[Path]) -> str:
    """Return the position of a maker's end-of-text token; nanoGPT puts it after each document, if there are several."""
    if eot_id is None:
        return "none"
    if maker != "nanoGPT":
        return "before"
    with open(train[-1], "rb") as file:
        file.seek(-2, os.SEEK_END)
        return "after" if int.from_bytes(file.read(2), "little") == eot_id else "none"
