"""Compare texts with the golden files in `drawn/`, or write these again if GPURUN_UPDATE_GOLDEN=1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DRAWN = Path(__file__).parent / "drawn"


def check(name: str, drawn: str) -> None:
    """Assert that a text equals its golden file; write the file first if GPURUN_UPDATE_GOLDEN=1."""
    path = DRAWN / name
    if os.environ.get("GPURUN_UPDATE_GOLDEN") == "1":
        path.write_text(drawn + "\n", encoding="utf-8")
    assert drawn + "\n" == path.read_text(encoding="utf-8")


def check_scenes(name: str, scenes: Mapping[str, str]) -> None:
    """Check several short texts as one golden file, each below the name of its scene."""
    check(name, "\n\n".join(f"== {scene}\n{text.rstrip()}" for scene, text in scenes.items()))
