"""A home of its own for every test of this room, and a check that nothing outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.providers.local import LocalProvider


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Home]:
    """A home; whatever instance a failing test leaves in it is ended."""
    home = Home(tmp_path / "home")
    yield home
    provider = LocalProvider(home, SystemClock())
    for instance in provider.find(None):
        provider.destroy(instance.id)
