"""Read at the provider whether a machine is gone: one reading, a series of readings, and the proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpurun.core.clock import Clock
from gpurun.core.journal_events import DeathProven, MachineGone
from gpurun.core.records import Instance, InstanceState, digest_json
from gpurun.ledger.billed_time import WATCHED_S
from gpurun.lifecycle.context import Note
from gpurun.providers.base import Provider


@dataclass(frozen=True)
class InstanceReading:
    """The result of one check: the machine's state, and whether the list has a living machine with its token."""

    at_s: float
    state: InstanceState
    listed: bool
    answer_sha256: str
    ended_wall: float | None = None
    """When the machine ended, on the provider's clock, if the provider reports it."""
    ran_s: float | None = None
    """Seconds that a queued job ran, if the provider reports them."""

    @property
    def gone(self) -> bool:
        """Return whether both the read and the list show the machine as gone."""
        return self.state is InstanceState.GONE and not self.listed


@dataclass
class GoneRow:
    """Consecutive replies about one machine that say GONE.

    A reply with another state breaks the series, and so do two minutes without a reply.
    """

    clock: Clock
    since_mono: float | None = None
    last_mono: float = 0.0

    def read(self, provider: Provider, identifier: str) -> Instance:
        """Read the machine. If the reply is the first GONE, read again, because one reply may be wrong."""
        machine = provider.read(identifier)
        if machine.state is InstanceState.GONE and self.since_mono is None:
            machine = provider.read(identifier)
        self.take(machine.state)
        return machine

    def take(self, state: InstanceState) -> None:
        """Add the next reply. UNKNOWN changes nothing."""
        now_mono = self.clock.monotonic()
        if state is not InstanceState.UNKNOWN and (state is not InstanceState.GONE or self.seconds is None):
            self.since_mono = None
        if state is InstanceState.GONE:
            self.since_mono = now_mono if self.since_mono is None else self.since_mono
            self.last_mono = now_mono

    @property
    def seconds(self) -> float | None:
        """Return how long the series has lasted; None if there is no series or a pause has broken it."""
        now_mono = self.clock.monotonic()
        is_on = self.since_mono is not None and now_mono - self.last_mono <= WATCHED_S
        return round(now_mono - self.since_mono, 3) if is_on and self.since_mono is not None else None

    def notes(self, provider: Provider, identifier: str) -> Iterator[Note]:
        """Yield a record of the series, if any, because its time does not count as time in which the machine ran."""
        if (gone_s := self.seconds) is not None:
            message = f"{provider.name} has shown {identifier} as gone for {gone_s:.0f} s, and it never answered"
            yield MachineGone(message=message, id=identifier, gone_s_ago=gone_s)


def look_at_instance(
    provider: Provider, identifier: str, token: str, at_s: float, *, but: str = "", row: GoneRow | None = None
) -> InstanceReading:
    """Read the machine and the provider's list; return one reading. An unclear reply is a reading that proves nothing.

    A listed machine with the id `but` is ignored. `row` records since when the machine is shown as gone: from then on
    it costs nothing, and reading the list may take long.
    """
    read = partial(row.read, provider) if row is not None else provider.read
    try:
        machine = read(identifier) if identifier else None
        listed = provider.find(token)
    except Exception as error:  # noqa: BLE001 - any failure is a missing reply.
        return InstanceReading(at_s, InstanceState.UNKNOWN, listed=True, answer_sha256=digest_json(str(error)))
    answer = digest_json([_dump_instance(machine), [_dump_instance(other) for other in listed]])
    # Some clouds list dead machines for an hour, and include machines with a similar name.
    alive = any(other.id != but for other in living_instances(listed, token))
    facts = (machine.state, machine.ended_wall, machine.ran_s) if machine else (InstanceState.GONE, None, None)
    state, ended_wall, ran_s = facts
    return InstanceReading(at_s, state, listed=alive, answer_sha256=answer, ended_wall=ended_wall, ran_s=ran_s)


def _dump_instance(instance: Instance | None) -> object:
    return instance.model_dump(mode="json") if instance else None


def gap_s(provider: Provider) -> float:
    """Return the seconds to wait between two readings."""
    return provider.traits.death_spread_s / max(1, provider.traits.death_reads - 1)


def _spread_s(readings: list[InstanceReading]) -> float:
    return round(readings[-1].at_s - readings[0].at_s, 3)


def are_proof(provider: Provider, readings: list[InstanceReading]) -> bool:
    """Return whether there are enough readings over enough time for this provider. All of them must show GONE."""
    traits = provider.traits
    return len(readings) >= traits.death_reads and _spread_s(readings) >= traits.death_spread_s


def proof_of(provider: Provider, identifier: str, readings: list[InstanceReading]) -> DeathProven:
    """Return the record that proves the end of a machine with these readings."""
    return DeathProven(
        id=identifier,
        teardown=provider.traits.teardown,
        reads=len(readings),
        spread_s=_spread_s(readings),
        evidence_sha256=digest_json([[r.at_s, r.state, r.listed, r.answer_sha256] for r in readings]),
    )


def living_instances(found: Sequence[Instance], token: str) -> list[Instance]:
    """Return the instances that are not gone and have exactly this token. A provider's search may match others too."""
    return [instance for instance in found if instance.token == token and instance.state is not InstanceState.GONE]
