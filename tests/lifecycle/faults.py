"""Helpers shared by test_faults.py and other tests."""

from __future__ import annotations

import base64
import json
from typing import Any

from gpurun.core.journal_records import Phase
from gpurun.ledger.audit import audit
from tests.lifecycle.scripted_cloud import World


def receipt_of(world: World) -> dict[str, Any]:
    statement = json.loads(base64.b64decode(json.loads(world.folder.receipt.read_bytes())["payload"]))
    predicate: dict[str, Any] = statement["predicate"]
    return predicate


def ended(world: World) -> bool:
    """Assert that the run is closed, no machine lives, and the meter is within the cap and the receipt's bound."""
    assert world.state.phase is Phase.CLOSED
    assert world.cloud.alive == []
    assert world.cloud.metered() <= (world.plan.cap_micros or 0)
    assert receipt_of(world)["cost"]["upper_bound_micros"] >= world.cloud.metered()
    return True


def kept(world: World) -> bool:
    """Assert what `ended` asserts, and that the audit finds no problem."""
    assert [row.problems for row in audit(world.home).rows] == [()]
    return ended(world)
