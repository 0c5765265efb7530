"""The golden texts in `drawn/`: each is compared, or written again where GPURUN_UPDATE_GOLDEN=1 asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DRAWN = Path(__file__).parent / "drawn"


def check(name: str, drawn: str) -> None:
    """Compare with the golden file, or rewrite it when asked to."""
    path = DRAWN / name
    if os.environ.get("GPURUN_UPDATE_GOLDEN") == "1":
        path.write_text(drawn + "\n", encoding="utf-8")
    assert drawn + "\n" == path.read_text(encoding="utf-8")


def check_scenes(name: str, scenes: Mapping[str, str]) -> None:
    """Compare several short texts, each below the name of its scene."""
    check(name, "\n\n".join(f"== {scene}\n{text.rstrip()}" for scene, text in scenes.items()))
