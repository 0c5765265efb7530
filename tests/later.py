"""The marker of tests too long for every day: `make full` runs them, with GPURUN_SOAK for longer searches."""

from __future__ import annotations

import os

import pytest

SOAK = "GPURUN_SOAK" in os.environ
LATER = pytest.mark.slow


def examples(full: int) -> int:
    """Return the number of examples to try: `full` in `make full`, otherwise a quarter of it, rounded up."""
    return full if SOAK else -(-full // 4)
