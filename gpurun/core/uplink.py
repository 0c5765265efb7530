"""How fast this computer sends, and what that figure rests on."""

from __future__ import annotations

from gpurun.core.records import Frozen


class Uplink(Frozen):
    """How fast this computer sends, and in the plan's words what that rests on."""

    bits_per_s: float = 20e6
    basis: str = "assumed"

    @property
    def words(self) -> str:
        """`20 Mbit/s, assumed`."""
        mbit = self.bits_per_s / 1e6
        return f"{mbit:{'.0f' if mbit >= 10 else '.2g'}} Mbit/s, {self.basis}"
