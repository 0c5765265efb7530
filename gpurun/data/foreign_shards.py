"""Recognises shards that another program made, by their names and first bytes (docs/DATA.md)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.data.refusals import reading

META = "meta.pkl"
"""The file with the characters of nanoGPT's character-level tokeniser."""
_NANOGPT = {"train.bin": "train", "val.bin": "val"}
_LLM_C = {20240520: "llm.c", 20240801: "llm.c, of uint32 (Llama 3)"}
_NPY = b"\x93NUMPY"
_SPLIT = re.compile(r"(?:^|[_.-])(train|val)(?=[_.-])")
OWN = ("data.json", "prepare.json")
"""A folder of gpurun's own shards has at least one of these files, even while it is unfinished."""


def split_of(path: Path) -> str:
    """Return the split in a shard's name, "train" or "val"; "" if the name contains neither or both."""
    splits = set(_SPLIT.findall(path.name.lower()))
    return splits.pop() if len(splits) == 1 else ""


def maker_of(path: Path) -> str:
    """Return the maker of a shard: "nanoGPT", "llm.c", "npy", "llm.c, of uint32 (Llama 3)"; "" if it is not a shard."""
    if path.suffix not in (".bin", ".npy") or not path.is_file():
        return ""
    with open(path, "rb") as file:
        head = file.read(len(_NPY))
    if path.suffix == ".npy":
        return "npy" if head == _NPY and split_of(path) else ""
    return _LLM_C.get(int.from_bytes(head[:4], "little")) or ("nanoGPT" if head and path.name in _NANOGPT else "")


def foreign_shards(folder: Path) -> dict[Path, str]:
    """Return the shards in a folder with the maker of each, sorted by name."""
    with reading(folder):
        return {path: maker for path in sorted(folder.iterdir()) if (maker := maker_of(path))}


def refuse_foreign(place: Path) -> None:
    """Raise UsageError if `place` is a shard of another program, or a folder that contains such shards."""
    with reading(place):
        for path in _list_files_to_check(place):
            if maker := maker_of(path):
                raise foreign_shards_error(path.parent, maker)


def _list_files_to_check(place: Path) -> Iterator[Path]:
    """Yield a file itself; for a folder, its files and those one level below, except in folders of gpurun's shards."""
    if not place.is_dir():
        yield place
        return
    here = sorted(place.iterdir())
    yield from here
    for below in (entry for entry in here if entry.is_dir() and not entry.name.startswith(".")):
        inside = sorted(below.iterdir())
        if not {path.name for path in inside} & {*OWN}:
            yield from inside


def foreign_shards_error(folder: Path, maker: str) -> UsageError:
    """Return the error for shards that another program made; its hint says how to use them."""
    place, what = shlex.quote(str(folder)), f"{folder} contains shards ({maker}), not text."
    if (folder / "data.json").is_file():
        hint = f"Name their folder, which has their data.json: --data {place}"
    elif "uint32" in maker:
        hint = "gpurun reads only shards of uint16; prepare the text again with the tokeniser gpt2, char or bpe."
    else:
        tokenizer = "char" if (folder / META).is_file() else "gpt2"
        hint = f"First: gpurun data adopt {place} --tokenizer {tokenizer} --out NEW; then use --data NEW. "
        hint += "To use a text in the same folder, name its file."
    return UsageError("data.foreign_shards", what, hint=hint)
