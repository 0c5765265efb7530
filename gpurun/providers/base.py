"""Defines the provider interface: six verbs, three refusals, and the waiting times before an answer can be trusted.

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
    """The provider has no capacity, so it certainly created nothing. Another offer may be tried."""


class Rejected(Exception):
    """The provider refused, so it certainly created nothing. A retry would be refused, too.

    With `of_offer`, the reason may concern this offer alone, so another offer may be tried.
    """

    def __init__(self, message: str = "", *, of_offer: bool = False) -> None:
        super().__init__(message)
        self.of_offer = of_offer


class Unknown(Exception):
    """The answer was lost or unclear, so the request may have been carried out. Look before you repeat it.

    `found` are the instances from a list that was only partly read. They may be destroyed, but others may exist.
    `again` repeats a create if the provider recognises a repeated request: it returns the instance or raises Unknown.
    `left` are the leftovers that were listed. `regions` are the only regions that did not answer, if all others
    answered completely. `hint` is what to do, if the reason is known.
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
    """The provider answered only "too many requests" for as long as gpurun retried."""


class EndsBy(StrEnum):
    """What ends a machine at its deadline if this computer does not."""

    PROVIDER = "provider"
    """The provider's own time limit, whatever runs on the machine."""
    MACHINE = "machine"
    """A program on the machine, which root on the machine can stop."""
    REQUEST = "request"
    """A program on the machine that must send a request, which the provider must accept."""


@dataclass(frozen=True)
class Traits:
    """The waiting times of a provider, and how its machines end.

    `settle_s`: how long a new instance may stay invisible if the answer of its create was lost.
    `poll_s`: the pause between two readings.
    `death_reads` readings of GONE, spread over `death_spread_s`, prove an end if the list does not have it either.
    `ends_by`: what ends a machine at its deadline. Only the provider's own time limit bounds the cost of a machine that
    gpurun cannot see.
    """

    settle_s: float
    poll_s: float
    death_reads: int
    death_spread_s: float
    teardown: Teardown
    console_url: str
    ends_by: EndsBy = EndsBy.REQUEST

    @property
    def removes_files(self) -> bool:
        """Return whether destroying a machine removes its files. Those on your own box or a cluster stay."""
        return self.teardown is Teardown.DESTROYED or self.is_this_computer

    @property
    def closes_address(self) -> bool:
        """Return whether a destroyed machine's address stops answering. A cluster's login node does not."""
        return self.teardown is Teardown.DESTROYED

    @property
    def is_this_computer(self) -> bool:
        """Return whether the machine is this computer, so that files outside a run's folder need no download."""
        return self.teardown is Teardown.PROCESSES_KILLED_HOST_KEPT


class Provider(Protocol):
    """One provider. Every verb may raise `Unknown` (no clear answer) or a `SetupError` (key or permission)."""

    @property
    def name(self) -> str:
        """Return the provider's name in `--provider` and in journals."""
        ...

    @property
    def traits(self) -> Traits:
        """Return the provider's waiting times, and how its machines end."""
        ...

    def verify(self) -> Account:
        """Check that the key works. Return the account with its missing permissions; costs nothing."""
        ...

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """Return what can be rented for this need now, at live prices, without what is known to be sold out.

        `known` are the catalogue's rows for this provider and card, with any number of cards. They give all facts but
        price and region. Other machine types are not offered, because their speed is unknown. Changes nothing.
        """
        ...

    def create(self, order: Order) -> Instance:
        """Request an instance that carries `order.token`. Return it without waiting for its boot.

        Raises NoCapacity or Rejected if certainly nothing was created, Unknown if an instance may exist.
        """
        ...

    def find(self, token: str | None) -> list[Instance]:
        """Return the instances with the token (None: any of gpurun's), in every region and state, oldest first."""
        ...

    def read(self, instance_id: str) -> Instance:
        """Return one instance as the provider describes it; GONE if the provider reports that it does not exist."""
        ...

    def destroy(self, instance_id: str) -> None:
        """Request the end of an instance. Idempotent. Only `read` and `find` can prove the end."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A provider whose machines end themselves by a timer that obeys a file (docs/FORMATS.md, "The guard's clock").

    The timer is part of the create and starts when the machine boots. It counts as armed only once it was read back.
    """

    @property
    def guard_shares_key(self) -> bool:
        """Return whether the timer uses the user's own key. If the provider refuses that key, the timer fails, too."""
        ...

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder on the machine in which the timer keeps its time; "" without a timer."""
        ...


@runtime_checkable
class LetsIn(Protocol):
    """A provider with a firewall that admits only this computer's address, which may change."""

    def let_in(self, instance: Instance) -> None:
        """Admit this computer's present address to an instance; cheap to repeat."""
        ...


@runtime_checkable
class HasAccounts(Protocol):
    """A provider with separate accounts. An account does not see what another account rented."""

    def account_mark(self) -> str:
        """Return a short mark of the account, which reveals no secret. Raises the same errors as the verbs.

        `account:…` is the same for every key of an account. If the provider does not identify the account, the mark is
        `key:…`, which is different for each key.
        """
        ...


@runtime_checkable
class ExplainsJobs(Protocol):
    """A provider that may accept a job that can never run, and that can explain why."""

    def never_runs(self, instance: Instance) -> GpurunError | None:
        """Return the error of a job that will never start or failed in its set-up; else None. May raise `Unknown`."""
        ...

    def setup_log(self, instance: Instance) -> bytes:
        """Return the output of the job's set-up, only its end if it is long; b"" without one. May raise `Unknown`."""
        ...


@runtime_checkable
class LimitsJobs(Protocol):
    """A provider that limits how long a job runs, whatever the cap is."""

    def lease_within(self, lease: Lease, offer: Offer, choices: Choices, cap: Micros | None) -> Lease:
        """Return the lease, cut down to the caps and the provider's limit; NoOffer if no time is left to train.

        May raise `Unknown`.
        """
        ...


@runtime_checkable
class TellsWhoEnded(Protocol):
    """A provider that may record whether the user or another person ended a machine."""

    def was_ended_by_user(self, instance: Instance) -> bool:
        """Return whether the machine's own user ended it; False without a record of that. Raises nothing."""
        ...


@runtime_checkable
class ShowsQueue(Protocol):
    """A provider with a queue for its instances, which can report an instance's place."""

    def queue_words(self, instance: Instance) -> str:
        """Return a line for the user: why the instance waits, its place, its expected start. May raise `Unknown`."""
        ...


@runtime_checkable
class KeyEnds(Protocol):
    """A provider with keys that may expire. After that, this computer can no longer terminate a machine."""

    def key_ends_wall(self) -> float:
        """Return when the key expires, by the wall clock; infinity if never, 0 if the time is not known."""
        ...


@runtime_checkable
class SpotNotice(Protocol):
    """A provider with spot machines that can read a warning before the provider reclaims them."""

    @property
    def notice_url(self) -> str:
        """Return the URL at which a machine reads the warning, in the protocol of EC2's metadata service (IMDSv2)."""
        ...


@runtime_checkable
class TellsTime(Protocol):
    """A provider that sends its own time with each answer."""

    @property
    def clock_ahead_s(self) -> float | None:
        """Return how many seconds this machine's clock is ahead, by the provider's last answer; None before one."""
        ...

    def ask_time(self) -> None:
        """Send a small request to learn the provider's present time. May raise `Unknown` or SetupError."""
        ...


@runtime_checkable
class HasRegions(Protocol):
    """A provider with named regions."""

    def regions(self) -> tuple[str, ...]:
        """Return the names of the regions that this account may use, even without capacity. May raise `Unknown`."""
        ...


@runtime_checkable
class FindsInRegions(Protocol):
    """A provider that can search some of its regions alone."""

    def find_in(self, regions: Sequence[str]) -> list[Instance]:
        """Return all of gpurun's instances in these regions, as `find(None)` does for all regions."""
        ...


@runtime_checkable
class HasEndpoint(Protocol):
    """A provider that can be reached at another address, for example set by an environment variable."""

    @property
    def endpoint(self) -> str:
        """Return the address in use; "" if it is the provider's own. Raises nothing."""
        ...


def endpoint_of(provider: Provider) -> str:
    """Return the address to which requests go; "" if it is the provider's own, or if there are no requests."""
    return provider.endpoint if isinstance(provider, HasEndpoint) else ""


def their_wall(provider: Provider, clock: Clock) -> float:
    """Return the time by the provider's clock, or by this machine's if no answer has shown the provider's."""
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
    """A provider with resources, such as disks, that may stay after the machine is gone."""

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Return the resources that carry the token (None: any token of gpurun's), in every region, except machines."""
        ...

    def remove(self, leftover: Leftover) -> None:
        """Request the removal of a leftover. Idempotent. Only `leftovers` can prove the removal."""
        ...


@runtime_checkable
class ReportsCharges(Protocol):
    """A provider that reports what it billed."""

    def charges(self, instance_id: str, from_wall: float, to_wall: float) -> Charge | None:
        """Return what was billed for an instance in this period; None if the provider has no record of it yet."""
        ...
