"""What is too long for every day: `make soak` runs it."""

from __future__ import annotations

import os

import pytest

SOAK = "GPURUN_SOAK" in os.environ
LATER = pytest.mark.skipif(not SOAK, reason="a long check: make soak runs it")
