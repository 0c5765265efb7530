"""The laptop's clock, which can be set, sleep or restart while true time continues, and the clock of true time."""

from __future__ import annotations

from gpurun.core.clock import VirtualClock


class TrueClock(VirtualClock):
    """The clock of true time.

    A sleep takes at least a millisecond; otherwise a wait for a remainder lost to rounding would never end.
    """

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, 0.001) if seconds > 0 else 0.0)


class LaptopClock:
    """The laptop's view of true time. `boot` names the boot to which its monotonic seconds belong."""

    def __init__(self, true: TrueClock) -> None:
        self.true = true
        self._skew_s = 0.0
        self._uncounted_s = 0.0
        self._boots = 1

    def boot(self) -> str:
        return f"boot-{self._boots}"

    def wall(self) -> float:
        return self.true.wall() + self._skew_s

    def monotonic(self) -> float:
        return self.true.monotonic() - self._uncounted_s

    def sleep(self, seconds: float) -> None:
        self.true.sleep(seconds)

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as a user can."""
        self._skew_s += seconds

    def doze(self, seconds: float) -> None:
        """Sleep as a closed laptop does if its kernel's monotonic clock does not count sleep."""
        self.true.sleep(seconds)
        self._uncounted_s += seconds

    def reboot(self) -> None:
        """Restart the monotonic clock, at 20 seconds."""
        self._uncounted_s = self.true.monotonic() - 20.0
        self._boots += 1
