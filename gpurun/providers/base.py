"""What every provider promises: six verbs, three refusals, and a few figures about how far its word can be trusted.

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
from gpurun.core.records import Account, Charge, GpuNeed, Instance, Leftover, Offer, Order, Teardown


class NoCapacity(Exception):
    """The provider certainly made nothing, because it has nothing of the kind left: another offer may be tried."""


class Rejected(Exception):
    """The provider certainly made nothing, for a reason that trying again does not mend.

    `of_offer`: the reason may lie in this offer alone, so another one may be tried.
    """

    def __init__(self, message: str = "", *, of_offer: bool = False) -> None:
        super().__init__(message)
        self.of_offer = of_offer


class Unknown(Exception):
    """The answer was lost or unclear: what was asked for may exist. Never ask again before looking.

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
    """No answer but "too many requests", for as long as it was waited for."""


class EndsBy(StrEnum):
    """Who ends a machine at its deadline, where nobody at home does."""

    PROVIDER = "provider"
    """The provider itself, by a time limit of its own, whatever runs on the machine."""
    MACHINE = "machine"
    """A program on the machine, which its root can stop."""
    REQUEST = "request"
    """Such a program, and only once the provider takes its request."""


@dataclass(frozen=True)
class Traits:
    """How a provider behaves in time; all of it is waiting, none of it is trust.

    `settle_s`: how long an instance may stay invisible after a create whose answer was lost.
    `death_reads` reads that say GONE, spread over `death_spread_s`, prove a death, together with absence from the list.
    `ends_by`: on whom an end at the deadline depends; only the provider's own time limit bounds a cost unseen.
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
        """Whether the end of a machine takes away what lies on it; a box and a cluster's folder outlive a run."""
        return self.teardown is Teardown.DESTROYED or self.is_this_computer

    @property
    def takes_address(self) -> bool:
        """Whether the end of a machine also ends what answers at its address; a login node outlives a job."""
        return self.teardown is Teardown.DESTROYED

    @property
    def is_this_computer(self) -> bool:
        """Whether it runs here, so that all that lies outside of a run's folder is at home already."""
        return self.teardown is Teardown.PROCESSES_KILLED_HOST_KEPT


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

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        """What can be rented for this need now, at its live price, with capacity as far as is told; read-only.

        `known` are the catalogue's rows of this provider for the card, in any number: a machine type that the catalogue
        does not know is not offered, since nothing could be said of its speed. A row gives all but price and region.
        """
        ...

    def create(self, order: Order) -> Instance:
        """Ask for an instance that carries `order.token`, and return at once.

        Raises NoCapacity or Rejected when certainly nothing was made, Unknown when something may exist.
        """
        ...

    def find(self, token: str | None) -> list[Instance]:
        """Everything that carries the token (None: all of gpurun's), in all regions and any state, oldest first."""
        ...

    def read(self, instance_id: str) -> Instance:
        """One instance as the provider tells it; GONE when it says that there is none."""
        ...

    def destroy(self, instance_id: str) -> None:
        """Ask for its end. Idempotent, and only a request: proof comes from `read` and `find`."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A provider whose machines end themselves by a timer that obeys a file (docs/FORMATS.md, "The guard's clock").

    It goes with the create, and begins where the machine boots; until it was read back nobody calls it armed.
    """

    @property
    def guard_shares_key(self) -> bool:
        """Whether the timer asks the provider with our own key: where that is refused, so is the timer."""
        ...

    def guard_folder(self, instance: Instance) -> str:
        """Where the timer on a machine, as the provider told of it, keeps its time; "" where it has no timer."""
        ...


@runtime_checkable
class LetsIn(Protocol):
    """A provider whose machines are open to this laptop's address alone, which may change on the way."""

    def let_in(self, instance: Instance) -> None:
        """Open an instance to the address that this laptop has now; cheap to call again and again."""
        ...


@runtime_checkable
class HasAccounts(Protocol):
    """A provider that tells one customer from another: what one account rented does not exist for the next."""

    def account_mark(self) -> str:
        """A short mark of the account that the key belongs to; nothing secret follows. It raises what other verbs do.

        `account:…` is the same for every key of an account. Where the provider does not tell who its customer is, it is
        `key:…`, and a new key of the same account has another.
        """
        ...


@runtime_checkable
class ExplainsJobs(Protocol):
    """A provider that may take a job which never does its work, and tells why."""

    def never_runs(self, instance: Instance) -> GpurunError | None:
        """Return the error of a job that is not admitted, or whose set-up failed; else None. May raise `Unknown`."""
        ...

    def setup_log(self, instance: Instance) -> bytes:
        """Return what the job's own set-up has said, of a long text the end; b"" without one. May raise `Unknown`."""
        ...


@runtime_checkable
class ShowsQueue(Protocol):
    """A provider whose instances wait for their turn, and which can say where they stand."""

    def queue_words(self, instance: Instance) -> str:
        """Return why it waits, its place and its expected start, for a person; may raise `Unknown`."""
        ...


@runtime_checkable
class KeyEnds(Protocol):
    """A provider whose key may end by itself, as a session does: then nobody here can end a machine any more."""

    def key_ends_wall(self) -> float:
        """When it ends, by the wall clock: infinity where it never does, 0 where it does and nobody says when."""
        ...


@runtime_checkable
class SpotNotice(Protocol):
    """A provider whose spot machines can read beforehand that they are to be taken away."""

    @property
    def notice_url(self) -> str:
        """Where a machine asks for that, as EC2's metadata service answers (IMDSv2)."""
        ...


@runtime_checkable
class TellsTime(Protocol):
    """A provider whose answers carry its own time."""

    @property
    def clock_ahead_s(self) -> float | None:
        """How far this machine's clock is ahead of the provider's, by its last answer; None before the first."""
        ...

    def ask_time(self) -> None:
        """Ask for something small, so that there is an answer of this moment. May raise `Unknown` or SetupError."""
        ...


@runtime_checkable
class HasRegions(Protocol):
    """A provider whose machines stand in places that can be asked for by name."""

    def regions(self) -> tuple[str, ...]:
        """The names that this account may ask for, with capacity or without. May raise `Unknown`."""
        ...


@runtime_checkable
class FindsInRegions(Protocol):
    """A provider that lists one region at a time."""

    def find_in(self, regions: Sequence[str]) -> list[Instance]:
        """Everything of gpurun's in these regions, as `find(None)` has it for all of them."""
        ...


@runtime_checkable
class HasEndpoint(Protocol):
    """A provider whose requests can be sent to another address than its own, as a variable of the environment may."""

    @property
    def endpoint(self) -> str:
        """The address that is asked in place of the provider's own; "" where that one is. It raises nothing."""
        ...


def endpoint_of(provider: Provider) -> str:
    """Where a provider's requests go, if not to its own address; "" there, and where nothing is sent anywhere."""
    return provider.endpoint if isinstance(provider, HasEndpoint) else ""


def their_wall(provider: Provider, clock: Clock) -> float:
    """The time by the provider's clock, as far as its answers have told it; else by this machine's."""
    ahead_s = provider.clock_ahead_s if isinstance(provider, TellsTime) else None
    return clock.wall() - (ahead_s or 0.0)


CLOCK_SLACK_S = 60.0


def clock_warning(provider: Provider) -> list[str]:
    """One sentence when this machine's clock and the provider's differ by more than a minute."""
    ahead_s = (provider.clock_ahead_s if isinstance(provider, TellsTime) else None) or 0.0
    if abs(ahead_s) <= CLOCK_SLACK_S:
        return []
    way = "ahead of" if ahead_s > 0 else "behind"
    return [f"This machine's clock is {abs(ahead_s):.0f} s {way} {provider.name}'s: set it."]


@runtime_checkable
class LeavesThings(Protocol):
    """A provider where a rental leaves more than its machine."""

    def leftovers(self, token: str | None) -> list[Leftover]:
        """Side resources that carry the token (None: all that are gpurun's), in all regions, but for the machines."""
        ...

    def remove(self, leftover: Leftover) -> None:
        """Ask for the removal of one; idempotent, and only a request."""
        ...


@runtime_checkable
class ReportsCharges(Protocol):
    """A provider that tells what it billed."""

    def charges(self, instance_id: str, from_wall: float, to_wall: float) -> Charge | None:
        """What was billed for an instance in that time; None when the provider has no record of it yet."""
        ...
