"""What every provider promises: six verbs, three refusals, and a few figures about how far its word can be trusted.

A new provider is one file with a class that follows `Provider`, one line in `registry.py`, and a pass of the contract
suite in tests/contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpurun.core.model import Account, GpuNeed, Instance, Offer, Order, Teardown


class NoCapacity(Exception):
    """The provider certainly made nothing, because it has nothing of the kind left: another offer may be tried."""


class Rejected(Exception):
    """The provider certainly made nothing, for a reason that trying again does not mend."""


class Unknown(Exception):
    """The answer was lost or unclear: what was asked for may exist. Never ask again before looking."""


@dataclass(frozen=True)
class Traits:
    """How a provider behaves in time; all of it is waiting, none of it is trust.

    `settle_s`: how long an instance may stay invisible after a create whose answer was lost.
    `death_reads` reads that say GONE, spread over `death_spread_s`, prove a death, together with absence from the list.
    """

    settle_s: float
    poll_s: float
    death_reads: int
    death_spread_s: float
    teardown: Teardown
    console_url: str


class Provider(Protocol):
    """One cloud. Every verb may raise `Unknown` (no clear answer) or a `SetupError` (key or permission)."""

    @property
    def name(self) -> str:
        """The name in `--provider` and in journals."""
        ...

    @property
    def traits(self) -> Traits:
        """Waiting times and the kind of end that this provider gives."""
        ...

    def verify(self) -> Account:
        """Check that the key works, and say which permissions are missing; cheap."""
        ...

    def offers(self, need: GpuNeed) -> list[Offer]:
        """What can be rented for this need now; read-only."""
        ...

    def create(self, order: Order) -> Instance:
        """Ask for an instance that carries `order.token`, and return at once.

        Raises NoCapacity or Rejected when certainly nothing was made, Unknown when something may exist.
        """
        ...

    def find(self, token: str | None) -> list[Instance]:
        """Everything that bears the token (None: all that is gpurun's), in all regions and any state, oldest first."""
        ...

    def read(self, instance_id: str) -> Instance:
        """One instance as the provider tells it; GONE when it says that there is none."""
        ...

    def destroy(self, instance_id: str) -> None:
        """Ask for its end. Idempotent, and only a request: proof comes from `read` and `find`."""
        ...
