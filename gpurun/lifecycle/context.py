"""What every step is given besides the run's state: the plan, the provider, the far side, the clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.core.clock import Clock, boot_id
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.model import Instance, InstanceState
from gpurun.core.paths import Home, RunFolder
from gpurun.core.plan import Plan
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.control import STRENGTH, read_wish
from gpurun.machine.far import FarSide
from gpurun.providers.base import LetsIn, Provider, Rejected, TellsTime, Unknown, their_wall

RETRY_S = 2.0
UNSEEN_S = 120.0
# What the far side refuses only for now: an earlier call that was cut off still holds on, or has done it all meanwhile,
# or the line broke again.
PASSING = frozenset({"busy", "cut_stream", "no_layout"})

# A step yields what it is about to do or has seen; the line after a yield runs only once the record is on disk.
Note = tuple[Event, dict[str, object]]


class StopWanted(GpurunError):
    """The user asked for a stop while a step was at work; the driver records it and goes on from there."""

    def __init__(self) -> None:
        super().__init__("stop.wanted", "A stop was asked for.", hint="Nothing to do.")


@dataclass(frozen=True)
class Context:
    """Everything a step may touch.

    `reach` makes the way to an instance (it does not connect yet); `trainer` is the package that is shipped. `open`
    gives the provider of another approved offer; without it only the plan's first offer is tried. With `brings_early`
    checkpoints come home while training goes on. `ends_mono` is when the lease ends by the provider's clock, where that
    was asked (`ends_by_their_clock`).
    """

    home: Home
    folder: RunFolder
    plan: Plan
    clock: Clock
    provider: Provider
    reach: Callable[[Instance], FarSide]
    trainer: Path
    open: Callable[[str], Provider] | None = None
    brings_early: bool = False
    ends_mono: float = float("inf")

    def on_offer(self, place: int) -> Context:
        """The same context on the approved offer at that place: its plan, its lease, its provider."""
        approved = self.plan.approved
        if self.open is None or place >= len(approved):
            return self
        plan = self.plan.on(approved[place])
        return replace(self, plan=plan, provider=self.provider_named(plan.offer.provider))

    def provider_named(self, name: str) -> Provider:
        """A provider by its name: this attempt's own, or one that another attempt asks."""
        return self.provider if name == self.provider.name or self.open is None else self.open(name)

    def has_offer(self, place: int) -> bool:
        """Whether there is an approved offer at that place."""
        return self.open is not None and place < len(self.plan.approved)

    def seconds_left(self, state: RunState) -> float:
        """Until the instance must be asked to end, so that it is gone by its deadline.

        By the wall clock or by the monotonic one, whichever says less.
        """
        if state.deadline_wall is None or state.create_wall is None:
            return float("inf")
        ask_wall = state.deadline_wall - self.plan.lease.destroy_s
        by_wall = ask_wall - self.clock.wall()
        if state.create_boot_id != boot_id():
            return min(by_wall, self.ends_mono - self.clock.monotonic())
        return min(by_wall, ask_wall - state.create_wall - (self.clock.monotonic() - state.create_mono))

    def ends_by_their_clock(self, state: RunState) -> float:
        """When `seconds_left` is over by the provider's clock, asked once after a restart of this machine; else never.

        Ours may be hours off since then. It is told on the monotonic clock, as ours may be set right at any moment.
        """
        provider, told_wall = self.provider, state.instance.deadline_wall if state.instance else None
        if told_wall is None or state.create_boot_id == boot_id() or not isinstance(provider, TellsTime):
            return float("inf")
        with suppress(Exception):  # Whatever it was, it must not keep a supervisor from ending a machine by our clock.
            provider.ask_time()
        if provider.clock_ahead_s is None:
            return float("inf")
        left_s = told_wall - self.plan.lease.destroy_s - their_wall(provider, self.clock)
        return self.clock.monotonic() + left_s

    def paid_s(self, state: RunState) -> float:
        """For how long the instance has been paid for, by whichever clock says more."""
        if state.deadline_wall is None or state.create_wall is None:
            return 0.0
        return state.deadline_wall - self.plan.lease.destroy_s - state.create_wall - self.seconds_left(state)

    def unsettled_s(self, state: RunState) -> float:
        """How long the provider may still hide what was asked for; nothing once the instance was seen to run."""
        if state.facts:
            return 0.0
        settle_s = self.provider.traits.settle_s
        if state.heard_boot_id != boot_id():
            return settle_s
        return max(0.0, settle_s - (self.clock.monotonic() - state.heard_mono))

    def looks_late(self, state: RunState) -> bool:
        """Whether nobody has looked for so long, by either clock, that what was asked for may have lived meanwhile."""
        since_s = self.clock.wall() - state.heard_wall
        if state.heard_boot_id == boot_id():
            since_s = max(since_s, self.clock.monotonic() - state.heard_mono)
        return since_s > max(UNSEEN_S, self.provider.traits.settle_s)

    def wants_stop(self, state: RunState) -> bool:
        """Whether the user wants more than what the journal already has."""
        wish = read_wish(self.folder)
        return wish is not None and STRENGTH[wish.how] > STRENGTH[state.stop]

    def heed(self, state: RunState) -> None:
        """Raise StopWanted if the user wants a stop that the journal does not have yet."""
        if self.wants_stop(state):
            raise StopWanted

    def is_down(self, instance: Instance) -> bool | None:
        """Whether the provider says that the instance, as it was known, does not run; None where it says nothing.

        Two answers that differ mean no.

        It is asked when the instance did not answer: perhaps only because this laptop has another address now.
        """
        if isinstance(self.provider, LetsIn):
            with suppress(Unknown, Rejected, SetupError):
                self.provider.let_in(instance)
        try:
            told = self.provider.read(instance.id)
            if told.state is not InstanceState.GONE:
                return told.state is InstanceState.STOPPED or _has_moved(told, instance)
            return all(one.state is InstanceState.GONE for one in self.provider.find(instance.token))
        except (Unknown, Rejected, SetupError):
            return None


def _has_moved(told: Instance, known: Instance) -> bool:
    """Whether it runs at another address: a cloud gives one only with a restart, which has ended all that ran there."""
    now, before = told.address, known.address
    return told.state is InstanceState.RUNNING and now is not None and before is not None and now != before


def instance_of(state: RunState) -> Instance:
    """The instance that the journal knows of; steps that need one are only reached when there is one."""
    if state.instance is None:
        raise RuntimeError(f"run {state.run} is {state.phase} without an instance")
    return by_our_clock(state.instance, state)


def by_our_clock(instance: Instance, state: RunState) -> Instance:
    """The run's instance with the deadline that the journal has: it tells its own by the provider's clock."""
    return instance.model_copy(update={"deadline_wall": state.deadline_wall})
