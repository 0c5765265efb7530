"""Shards that another program made: told by names and first bytes, never read as text (docs/DATA.md)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from gpurun.core.errors import UsageError
from gpurun.data.refusals import reading

META = "meta.pkl"
"""Where nanoGPT keeps the characters of its character level."""
_NANOGPT = {"train.bin": "train", "val.bin": "val"}
_LLM_C = {20240520: "llm.c", 20240801: "llm.c, of uint32 (Llama 3)"}
_NPY = b"\x93NUMPY"
_SPLIT = re.compile(r"(?:^|[_.-])(train|val)(?=[_.-])")
OWN = ("data.json", "prepare.json")
"""Of these a folder of our own shards has one, finished or not."""


def split_of(path: Path) -> str:
    """What a shard is for by its name, "train" or "val"; "" where the name says neither, or both."""
    told = set(_SPLIT.findall(path.name.lower()))
    return told.pop() if len(told) == 1 else ""


def maker_of(path: Path) -> str:
    """Whose shard a file is: "nanoGPT", "llm.c", "npy", "llm.c, of uint32 (Llama 3)"; "" for what is none."""
    if path.suffix not in (".bin", ".npy") or not path.is_file():
        return ""
    with open(path, "rb") as file:
        head = file.read(len(_NPY))
    if path.suffix == ".npy":
        return "npy" if head == _NPY and split_of(path) else ""
    return _LLM_C.get(int.from_bytes(head[:4], "little")) or ("nanoGPT" if head and path.name in _NANOGPT else "")


def foreign_shards(folder: Path) -> dict[Path, str]:
    """The shards that lie in a folder, by name, and who made each."""
    with reading(folder):
        return {path: maker for path in sorted(folder.iterdir()) if (maker := maker_of(path))}


def refuse_foreign(place: Path) -> None:
    """Refuse a shard that another program made, a folder of such, and one above it; UsageError says how to use them."""
    with reading(place):
        for path in _looked_at(place):
            if maker := maker_of(path):
                raise to_adopt(path.parent, maker)


def _looked_at(place: Path) -> Iterator[Path]:
    """A file itself; of a folder the files in it, then those one level below, but for shards that are our own."""
    if not place.is_dir():
        yield place
        return
    here = sorted(place.iterdir())
    yield from here
    for below in (one for one in here if one.is_dir() and not one.name.startswith(".")):
        inside = sorted(below.iterdir())
        if not {path.name for path in inside} & {*OWN}:
            yield from inside


def to_adopt(folder: Path, maker: str) -> UsageError:
    """The refusal of shards that another program made, with what makes them usable here."""
    place, what = shlex.quote(str(folder)), f"{folder} holds shards ({maker}), no text."
    if (folder / "data.json").is_file():
        hint = f"Name the folder, which has their data.json: --data {place}"
    elif "uint32" in maker:
        hint = "Shards of uint16 are read here; prepare the text again with the tokeniser gpt2, char or bpe."
    else:
        tokenizer = "char" if (folder / META).is_file() else "gpt2"
        hint = f"Describe them once: gpurun data adopt {place} --tokenizer {tokenizer} --out NEW; then --data NEW. "
        hint += "A text that lies beside them is named by its file."
    return UsageError("data.foreign_shards", what, hint=hint)
