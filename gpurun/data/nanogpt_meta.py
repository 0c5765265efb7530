"""Reads the characters of nanoGPT's character-level tokeniser from its meta.pkl, without running pickled code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import NoReturn

from gpurun.core.errors import UsageError
from gpurun.data.refusals import reading

_MOST_BYTES = 1 << 20


def characters_of(path: Path) -> list[bytes]:
    """Return the UTF-8 of each token, in the order of ids; UsageError if the file is not such a meta.pkl."""
    with reading(path), open(path, "rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES:,} bytes")
        itos = _Plain(io.BytesIO(raw)).load()["itos"]
        characters = [itos[number] for number in range(len(itos))]
        if not characters or len(set(characters)) != len(itos) or {len(char) for char in characters} != {1}:
            raise ValueError("itos does not map each id to a different character")
        return [character.encode() for character in characters]
    # A damaged pickle can raise almost anything.
    except Exception as error:  # noqa: BLE001
        what = f"{path} is not a meta.pkl of nanoGPT's characters: {str(error)[:200] or type(error).__name__}."
        raise UsageError("data.bad_meta", what, hint="Make it again with nanoGPT's prepare.py.") from None


class _Plain(pickle.Unpickler):
    """Unpickles only dicts, strings and numbers; any attempt to import something raises an error."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse."""
        raise pickle.UnpicklingError(f"it would run {module}.{name}")
