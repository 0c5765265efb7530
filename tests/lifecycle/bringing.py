"""Helpers shared by test_bringing.py and other tests."""

from __future__ import annotations

from typing import Any

from gpurun.core.journal_records import Event
from tests.lifecycle.scripted_cloud import World


def collected(world: World) -> dict[str, Any]:
    (record,) = world.all_of(Event.COLLECT_OBSERVED)
    return record
