"""What test_bringing.py and other tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from tests.lifecycle.scripted_cloud import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def collected(world: World) -> dict[str, Any]:
    (record,) = world.all_of(Event.COLLECT_OBSERVED)
    return record
