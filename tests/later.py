"""What is too long for every day: `make full` runs it, and sets GPURUN_SOAK so that searches go on for longer."""

from __future__ import annotations

import os

import pytest

SOAK = "GPURUN_SOAK" in os.environ
LATER = pytest.mark.slow


def examples(full: int) -> int:
    """How many examples a property is tried with: a quarter of them every day, all of them in `make full`."""
    return full if SOAK else -(-full // 4)
