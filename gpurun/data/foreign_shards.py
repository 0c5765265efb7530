"""Folders of tokens that others made: told by their files, never read as text."""

from __future__ import annotations

from pathlib import Path

from gpurun.core.errors import UsageError

_NPY = b"\x93NUMPY"
_LLM_C = {20240520: "llm.c", 20240801: "llm.c, of uint32 (Llama 3)"}


def foreign_shards(folder: Path) -> str:
    """Whose shards a folder holds: "nanoGPT", "llm.c", "npy", "llm.c, of uint32 (Llama 3)"; "" where there are none."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".bin", ".npy") and path.is_file():
            with open(path, "rb") as file:
                head = file.read(6)
            if path.suffix == ".npy" and head == _NPY:
                return "npy"
            if maker := _LLM_C.get(int.from_bytes(head[:4], "little")):
                return maker
            if path.name in ("train.bin", "val.bin"):
                return "nanoGPT"
    return ""


def to_adopt(folder: Path, maker: str) -> UsageError:
    """The refusal of a folder of another program's shards, with what makes them usable here."""
    what = f"{folder} holds shards ({maker}), no text."
    if "uint32" in maker:
        hint = "Shards of uint16 are read here; prepare the text again with the tokeniser gpt2, char or bpe."
        return UsageError("data.foreign_shards", what, hint=hint)
    hint = f"Describe them once: gpurun data adopt {folder} --tokenizer gpt2 --out NEW; then --data NEW."
    return UsageError("data.foreign_shards", what, hint=hint)
