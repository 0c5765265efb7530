"""Helpers of test_other_rules.py and other tests: homes whose receipts follow older rules."""

from __future__ import annotations

import tarfile
from pathlib import Path

from gpurun.core.paths import Home

HOMES = Path(__file__).with_name("homes_of_rules_1")


def unpacked(kind: str, into: Path, homes: Path = HOMES) -> Home:
    with tarfile.open(homes / f"{kind}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return Home(into / kind)
