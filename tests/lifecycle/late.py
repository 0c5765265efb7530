"""Helpers shared by test_late.py and other tests."""

from __future__ import annotations

from gpurun.core.journal_records import Event
from tests.lifecycle.scripted_cloud import World


def codes(world: World) -> list[str]:
    return [incident["code"] for incident in world.all_of(Event.INCIDENT)]
