"""What test_late.py and other tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from tests.lifecycle.never_gives_up import late_machine
from tests.lifecycle.scripted_cloud import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Absence was believed after two minutes; the machine shows after three, once the second attempt has trained."""
    world = World(Home(tmp_path))
    late_machine(world)
    return world


def codes(world: World) -> list[str]:
    return [one["code"] for one in world.all_of(Event.INCIDENT)]
