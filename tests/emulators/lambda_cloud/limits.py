"""The two rate limits: one request per second, and one launch per twelve seconds. A test can change both."""

from __future__ import annotations

from gpurun.core.clock import Clock


class Limits:
    """The times of the last request and the last launch. A request that is refused does not count."""

    def __init__(self, clock: Clock) -> None:
        self.gap_s, self.launch_gap_s = 1.0, 12.0
        self._clock = clock
        self._request = self._launch = float("-inf")

    def takes(self, route: str) -> bool:
        """Return whether a request may pass now; if so, count it."""
        now = self._clock.monotonic()
        if now - self._request < self.gap_s or (route == "launch" and now - self._launch < self.launch_gap_s):
            return False
        self._request = now
        if route == "launch":
            self._launch = now
        return True
