"""Sets of file names that Linux allows, including hostile ones, and a script that creates such files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hypothesis import strategies as st

NASTY = (
    b"runs/2026-11-27 00:41:05/model.pt", b"ckpt[best]/m.pt", b".hydra/config.yaml", b"new\nline", b"\x1b]0;x\x07",
    "\u202egnp.\u6a21\u578b".encode(), b"bad\xff\xfe", b"100%.txt", b"%41", b"A", b"a", b"CON", b"end. ", b"-rf", b"~",
    b"\\", b'"', b"x" * 255, b"*", b"d/" * 40 + b"deep",
)  # fmt: skip
PARTS = st.binary(min_size=1, max_size=40).map(lambda part: part.replace(b"/", b"_").replace(b"\0", b"_"))
NAMES = st.one_of(st.sampled_from(NASTY), st.lists(PARTS, min_size=1, max_size=5).map(b"/".join))
SETS = st.lists(NAMES, min_size=1, max_size=40, unique=True).map(lambda names: possible(names))
STAYING = (b".cache", b".venv", b".git", b"__pycache__", b"node_modules")


def possible(names: list[bytes]) -> dict[bytes, bytes]:
    """Return made-up contents by name, for the names that can exist together in one folder and may be downloaded."""
    kept: dict[bytes, bytes] = {}
    folders: set[bytes] = set()
    for name in names:
        parts = name.split(b"/")
        above = {b"/".join(parts[:end]) for end in range(1, len(parts))}
        if not {b".", b"..", b"", *STAYING}.isdisjoint(parts) or name in folders or above & kept.keys():
            continue
        folders |= above
        kept[name] = hashlib.sha256(name).digest() * (1 + len(name) % 50)
    return kept


def make(folder: Path, files: dict[bytes, bytes]) -> None:
    """Write the files below a folder."""
    for name, content in files.items():
        path = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def below(folder: Path) -> dict[bytes, bytes]:
    """Return the content of each file below a folder, by its relative path in bytes."""
    found, top = {}, os.fsencode(folder)
    for place, _, names in os.walk(top):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, top)] = file.read()
    return found


def script(files: dict[bytes, bytes]) -> str:
    """Return a Python program that writes the files into its working folder."""
    return f"import os\nfor name, content in {files!r}.items():\n" + (
        "    os.makedirs(os.path.dirname(b'./' + name), exist_ok=True)\n    open(name, 'wb').write(content)\n"
    )
