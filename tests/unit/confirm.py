"""Helpers of test_confirm.py and other tests: runs on the user's own box."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.ledger_samples import RATE, CloudRun, Note

BOX = "root@connect.example.com:40123"


class BoxRun(CloudRun):
    """A run on the user's own box over SSH, at the price that the user stated."""

    rate = RATE

    def intended(self, attempt: int = 1) -> Note:
        event, data = super().intended(attempt)
        data["offer"] |= {"provider": "ssh", "type_id": BOX}
        return event, {**data, "provider": "ssh", "rate_micros_per_hour": self.rate}

    def instance(self, **changes: Any) -> dict[str, Any]:
        return super().instance(**{"provider": "ssh", "type_id": BOX, "rate_micros_per_hour": None, **changes})

    def death(self, **changes: Any) -> Iterator[tuple[float, Note]]:  # type: ignore[override]
        return super().death(**{"reads": 1, "teardown": "user_operated", **changes})
