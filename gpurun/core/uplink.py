"""The upload speed of this computer, and the source of that figure."""

from __future__ import annotations

from gpurun.core.records import Frozen


class Uplink(Frozen):
    """The upload speed of this computer, and its source in the plan's words."""

    bits_per_s: float = 20e6
    basis: str = "assumed"

    @property
    def words(self) -> str:
        """Return, for example, `20 Mbit/s, assumed`."""
        mbit = self.bits_per_s / 1e6
        return f"{mbit:{'.0f' if mbit >= 10 else '.2g'}} Mbit/s, {self.basis}"
