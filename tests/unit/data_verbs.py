"""Helpers of test_data_verbs.py and other tests: a sample text, and gpurun with a chosen home."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import command_line

WORDS = "the quick brown fox jumps over a lazy dog while she sells sea shells by the sea shore\n"


def gpurun(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return command_line.gpurun(*arguments, "--home", str(home))
