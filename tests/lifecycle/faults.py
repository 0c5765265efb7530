"""What test_faults.py and other tests share."""

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
    """The run is closed, nothing lives, the meter kept to the cap, and the receipt says no less than the meter."""
    assert world.state.phase is Phase.CLOSED
    assert world.cloud.alive == []
    assert world.cloud.metered() <= (world.plan.cap_micros or 0)
    assert receipt_of(world)["cost"]["upper_bound_micros"] >= world.cloud.metered()
    return True


def kept(world: World) -> bool:
    """The same, and the audit finds nothing wrong with any of it."""
    assert [row.problems for row in audit(world.home).rows] == [()]
    return ended(world)
