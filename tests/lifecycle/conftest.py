"""Fixtures of the lifecycle tests: a home for each test, whose instances end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.providers.local import LocalProvider


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Home]:
    """Yield a fresh home, and afterwards end every instance that the test has left in it."""
    home = Home(tmp_path / "home")
    yield home
    provider = LocalProvider(home, SystemClock())
    for instance in provider.find(None):
        provider.destroy(instance.id)
