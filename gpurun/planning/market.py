"""The offers of the queried providers, and a warning about keys that expire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from gpurun.core.clock import utc
from gpurun.core.records import Offer


@dataclass(frozen=True)
class Market:
    """The offers as read at `read_wall`, the providers that were `queried`, and the `silent` ones with the reason.

    `warnings` are sentences for the plan, for example about a wrong clock, which would make a lease end late.
    `keys_end_wall` has the expiry times of those clouds' keys that expire; 0 if a time is not known.
    """

    offers: tuple[Offer, ...]
    silent: tuple[tuple[str, str], ...]
    read_wall: float
    queried: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    keys_end_wall: Mapping[str, float] = field(default_factory=dict)


def key_warning(market: Market, provider: str, until_wall: float) -> list[str]:
    """Return a warning if the key may expire before the rental ends."""
    ends_wall = market.keys_end_wall.get(provider, inf)
    if ends_wall >= until_wall:
        return []
    when = f"expire at {utc(ends_wall)}" if ends_wall else "are temporary, and it is not known when they expire"
    left = "without them gpurun can neither download nor end the machine; only the machine's own timer ends it"
    return [f"The credentials for {provider} {when}; the lease may last until {utc(until_wall)}. Renew them: {left}."]
