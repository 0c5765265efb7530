"""Helpers shared by test_money_review.py and other tests."""

from __future__ import annotations

from types import SimpleNamespace

from gpurun.core.clock import VirtualClock
from gpurun.core.paths import Home


class Session(SimpleNamespace):
    home: Home
    clock: VirtualClock
