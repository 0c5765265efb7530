"""The laptop's clock, which may be set, sleep, or begin again, while true time goes on."""

from __future__ import annotations

from gpurun.core.clock import VirtualClock


class TrueClock(VirtualClock):
    """True time. A wait is at least a millisecond, or what rounding leaves of a limit would be waited for for ever."""

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, 0.001) if seconds > 0 else 0.0)


class LaptopClock:
    """A clock over true time. `boot` names the boot that its monotonic seconds belong to."""

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
        """Somebody sets the clock."""
        self._skew_s += seconds

    def doze(self, seconds: float) -> None:
        """The lid is closed on a kernel whose monotonic clock does not count sleep."""
        self.true.sleep(seconds)
        self._uncounted_s += seconds

    def reboot(self) -> None:
        """Monotonic time begins again, at some small number."""
        self._uncounted_s = self.true.monotonic() - 20.0
        self._boots += 1
