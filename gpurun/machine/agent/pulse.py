"""Whether the trainer still moves: it says itself how long until its next beat, and this looks whether that came."""

from __future__ import annotations

import time

from gpurun.machine.agent.files import read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONGEST_S = 6 * 3600.0


class Pulse:
    """Watches `out/heartbeat.json`; a trainer that never wrote one is never called stuck."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.last: Any = None
        # Not the clock of the lease: while a laptop sleeps, its trainer does not train.
        self.seen_s = time.monotonic()

    def overdue_s(self) -> float:
        """Seconds since the last beat, once they are more than the trainer asked for; else 0."""
        beat = read(self.root, "out", "heartbeat.json")
        if beat != self.last:
            self.last, self.seen_s = beat, time.monotonic()
        patience_s: Any = beat.get("patience_s") if isinstance(beat, dict) else None
        if type(patience_s) not in (int, float) or not 0 < patience_s <= LONGEST_S:
            return 0.0
        silent_s = time.monotonic() - self.seen_s
        return silent_s if silent_s > patience_s else 0.0
