"""What every provider promises: six verbs, three refusals, and a few figures on how far its answers can be trusted.

A new provider is one file with a class that follows `Provider`, one line in `registry.py`, and a pass of the contract
suite in tests/contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError
from gpurun.core.money import Micros
from gpurun.core.records import Account, Charge, GpuNeed, Instance, Leftover, Offer, Order, Teardown
from gpurun.core.run_plan import Choices, Lease


class NoCapacity(Exception):
    """The provider certainly made nothing, because it has no capacity left: another offer may be tried."""


class Rejected(Exception):
    """The provider certainly made nothing, for a reason that a retry does not change.

    `of_offer`: the reason may concern this offer alone, so another one may be tried.
    """

    def __init__(self, message: str = "", *, of_offer: bool = False) -> None:
        super().__init__(message)
        self.of_offer = of_offer


class Unknown(Exception):
    """The answer was lost or unclear: what was requested may exist. Never repeat the request before looking.

    A list that could be read only in part has in `found` what it showed: enough to end a machine, never to believe that
    there are no others. A create that its provider takes twice without making two has in `again` how to send the same
    request once more; that gives the instance, or is Unknown. `left` are the things beside machines that were listed,
    `regions` those that alone gave no answer, where the others gave their whole lists. `hint` is what to do about a
    known reason.
    """

    def __init__(
        self,
        message: str = "",
        found: tuple[Instance, ...] = (),
        again: Callable[[], Instance] | None = None,
        *,
        left: tuple[Leftover, ...] = (),
        regions: frozenset[str] = frozenset(),
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.found, self.again, self.left, self.regions, self.hint = found, again, left, regions, hint


class Throttled(Unknown):
    """No answer but "too many requests", for as long as gpurun waited."""


class EndsBy(StrEnum):
    """Who ends a machine at its deadline if the laptop does not."""

    PROVIDER = "provider"
    """The provider itself, by its own time limit, whatever runs on the machine."""
    MACHINE = "machine"
    """A program on the machine, which its root can stop."""
    REQUEST = "request"
    """Such a program, and only if the provider accepts its request."""


@dataclass(frozen=True)
class Traits:
    """How a provider behaves over time; all of these are times to wait, not reasons to trust.

    `settle_s`: how long an instance may stay invisible after a create whose answer was lost.
    `death_reads` readings of GONE, spread over `death_spread_s`, prove an end, together with absence from the list.
    `ends_by`: who ends a machine at the deadline; only the provider's own time limit bounds an unseen cost.
    """

    settle_s: float
    poll_s: float
    death_reads: int
    death_spread_s: float
    teardown: Teardown
    console_url: str
    ends_by: EndsBy = EndsBy.REQUEST

    @property
    def takes_files(self) -> bool:
        """Return whether the end of a machine removes its files; a box and a cluster's folder outlive a run."""
        return self.teardown is Teardown.DESTROYED or self.is_this_computer

    @property
    def takes_address(self) -> bool:
        """Return whether the end of a machine also ends what answers at its address; a login node outlives a job."""
        return self.teardown is Teardown.DESTROYED

    @property
    def is_this_computer(self) -> bool:
        """Return whether it is this computer, so that everything outside a run's folder is at home already."""
        return self.teardown is Teardown.PROCESSES_KILLED_HOST_KEPT


class Provider(Protocol):
    """One cloud. Every verb may raise `Unknown` (no clear answer) or a `SetupError` (key or permission)."""

    @property
    def name(self) -> str:
        """Return its name in `--provider` and in journals."""
        ...

    @property
    def traits(self) -> Traits:
        """Return the waiting times and the kind of end of this provider."""
        ...

    def verify(self) -> Account:
        """Check that the key works, and report which permissions are missing; cheap."""
        ...

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return what can be rented for this need now, at its live price, with capacity as far as is known; read-only.

        `known` are the catalogue's rows of this provider for the card, in any number. A machine type that the catalogue
        does not have is not offered, because its speed is unknown. A row gives all but price and region.
        """
        ...

    def create(self, order: Order) -> Instance:
        """Request an instance that carries `order.token`, and return at once.

        Raises NoCapacity or Rejected if certainly nothing was made, Unknown if something may exist.
        """
        ...

    def find(self, token: str | None) -> list[Instance]:
        """Return everything that carries the token (None: all of gpurun's), in every region and state, oldest first."""
        ...

    def read(self, instance_id: str) -> Instance:
        """Return one instance as the provider describes it; GONE if the provider says that there is none."""
        ...

    def destroy(self, instance_id: str) -> None:
        """Request its end. Idempotent, and only a request: proof comes from `read` and `find`."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A provider whose machines end themselves by a timer that obeys a file (docs/FORMATS.md, "The guard's clock").

    The timer goes with the create and starts at the machine's boot; it counts as armed only after it was read back.
    """

    @property
    def guard_shares_key(self) -> bool:
        """Return whether the timer calls the provider with our own key: if that is refused, so is the timer."""
        ...

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder in which the timer of a machine keeps its time; "" if it has no timer."""
        ...


@runtime_checkable
class LetsIn(Protocol):
    """A provider whose machines admit only this laptop's address, which may change."""

    def let_in(self, instance: Instance) -> None:
        """Open an instance to the address that this laptop has now; cheap to repeat."""
        ...


@runtime_checkable
class HasAccounts(Protocol):
    """A provider with separate accounts: what one account rented does not exist for another."""

    def account_mark(self) -> str:
        """Return a short mark of the key's account, which reveals nothing secret. Raises what other verbs raise.

        `account:…` is the same for every key of an account. If the provider does not identify its customer, it is
        `key:…`, and a new key of the same account has another mark.
        """
        ...


@runtime_checkable
class ExplainsJobs(Protocol):
    """A provider that may accept a job which never does its work, and explains why."""

    def never_runs(self, instance: Instance) -> GpurunError | None:
        """Return the error of a job that is not admitted, or whose set-up failed; else None. May raise `Unknown`."""
        ...

    def setup_log(self, instance: Instance) -> bytes:
        """Return the output of the job's own set-up, or its end if it is long; b"" without one. May raise `Unknown`."""
        ...


@runtime_checkable
class LimitsJobs(Protocol):
    """A provider that lets a job run for a limited time, however much its user may spend."""

    def lease_within(self, lease: Lease, offer: Offer, choices: Choices, cap: Micros | None) -> Lease:
        """Return the lease of such a job, cut down to its caps and to the provider's limit; NoOffer if none is left.

        May raise `Unknown`.
        """
        ...


@runtime_checkable
class TellsWhoEnded(Protocol):
    """A provider that may know who ended a machine: others of its account, or its own user."""

    def was_ended_by_user(self, instance: Instance) -> bool:
        """Return whether its own user ended it; False also if the provider keeps no record of that. Raises nothing."""
        ...


@runtime_checkable
class ShowsQueue(Protocol):
    """A provider whose instances wait in a queue, and which can report their place."""

    def queue_words(self, instance: Instance) -> str:
        """Return why it waits, its place and its expected start, for people; may raise `Unknown`."""
        ...


@runtime_checkable
class KeyEnds(Protocol):
    """A provider whose key may expire, as a session does: then this computer cannot end a machine any more."""

    def key_ends_wall(self) -> float:
        """Return when it expires, by the wall clock: infinity if it never does, 0 if it does at an unknown time."""
        ...


@runtime_checkable
class SpotNotice(Protocol):
    """A provider whose spot machines can read a warning before they are taken away."""

    @property
    def notice_url(self) -> str:
        """Return where a machine reads that warning, answered like EC2's metadata service (IMDSv2)."""
        ...


@runtime_checkable
class TellsTime(Protocol):
    """A provider whose answers carry its own time."""

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how far this machine's clock is ahead of the provider's, by its last answer; None before the first."""
        ...

    def ask_time(self) -> None:
        """Send a small request, to get an answer of this moment. May raise `Unknown` or SetupError."""
        ...


@runtime_checkable
class HasRegions(Protocol):
    """A provider whose machines are in regions that can be requested by name."""

    def regions(self) -> tuple[str, ...]:
        """Return the names that this account may request, with capacity or without. May raise `Unknown`."""
        ...


@runtime_checkable
class FindsInRegions(Protocol):
    """A provider that lists one region at a time."""

    def find_in(self, regions: Sequence[str]) -> list[Instance]:
        """Return everything of gpurun's in these regions, as `find(None)` does for all regions."""
        ...


@runtime_checkable
class HasEndpoint(Protocol):
    """A provider whose requests can be sent to another address, for instance by an environment variable."""

    @property
    def endpoint(self) -> str:
        """Return the address that is used instead of the provider's own; "" if none is. Raises nothing."""
        ...


def endpoint_of(provider: Provider) -> str:
    """Return where a provider's requests go, if not to its own address; "" otherwise, or if it sends none."""
    return provider.endpoint if isinstance(provider, HasEndpoint) else ""


def their_wall(provider: Provider, clock: Clock) -> float:
    """Return the time by the provider's clock, as far as its answers showed it; else by this machine's."""
    ahead_s = provider.clock_ahead_s if isinstance(provider, TellsTime) else None
    return clock.wall() - (ahead_s or 0.0)


CLOCK_SLACK_S = 60.0


def clock_warning(provider: Provider) -> list[str]:
    """Return a warning if this machine's clock and the provider's differ by more than a minute."""
    ahead_s = (provider.clock_ahead_s if isinstance(provider, TellsTime) else None) or 0.0
    if abs(ahead_s) <= CLOCK_SLACK_S:
        return []
    way = "ahead of" if ahead_s > 0 else "behind"
    return [f"This machine's clock is {abs(ahead_s):.0f} s {way} {provider.name}'s: set it."]


@runtime_checkable
class LeavesThings(Protocol):
    """A provider where a rental leaves more than its machine."""

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Return the side resources that carry the token (None: all of gpurun's), in every region, but no machines."""
        ...

    def remove(self, leftover: Leftover) -> None:
        """Request the removal of one; idempotent, and only a request."""
        ...


@runtime_checkable
class ReportsCharges(Protocol):
    """A provider that reports what it billed."""

    def charges(self, instance_id: str, from_wall: float, to_wall: float) -> Charge | None:
        """Return what was billed for an instance in that time; None if the provider has no record of it yet."""
        ...
