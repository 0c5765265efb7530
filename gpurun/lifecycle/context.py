"""The context that every step receives besides the run's state: plan, provider, connection, clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpurun.core.background_call import Begin, Inline
from gpurun.core.clock import Clock, boot_id
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.journal_events import JournalEvent
from gpurun.core.journal_records import Extra, Moment, Record, RunState
from gpurun.core.money import Micros, format_left, left_of, ratio_of, seconds_within, total
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Instance, InstanceState
from gpurun.core.run_plan import Plan
from gpurun.core.stop_request import STRENGTH, read_stop_request
from gpurun.ledger.budget import Budgets
from gpurun.ledger.journal import read_journal
from gpurun.ledger.plan_from_journal import plan_of, read_leg_plan
from gpurun.ledger.rental import Rental, rentals_of
from gpurun.ledger.run_state import WORKING, Step, find_offer_place, next_step
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.planning.transfer import COLLECT_START_S
from gpurun.providers.base import (
    Guarded,
    LetsIn,
    Provider,
    Rejected,
    TellsTime,
    TellsWhoEnded,
    Unknown,
    their_wall,
)
from gpurun.remote.client import FarSide

# These phrases are used only before the deadline, and only if this home did not request the end.
_BY_HAND = "in its provider's console, or by another gpurun with this account's keys"
ENDED = f"it was ended by its provider, {_BY_HAND}"
TAKEN_BACK = "its provider took it back, as it may a spot machine"
TAKEN = f"{TAKEN_BACK}, or it was ended {_BY_HAND}"
RETRY_S = 2.0
UNSEEN_S = 120.0
BETWEEN_S = 1.0
# Temporary refusals by the agent: an earlier, interrupted call still has the lock or has done the work meanwhile, or
# the connection broke again.
PASSING = frozenset({"busy", "cut_stream", "no_layout"})

# What a step yields: something it will do, or has observed. The code after a yield runs once the record is on disk.
Note = JournalEvent


class StopWanted(GpurunError):
    """Raised inside a step when the user has requested a stop. The driver records the stop and continues."""

    def __init__(self) -> None:
        super().__init__("stop.wanted", "A stop was requested.", hint="Nothing to do.")


class MachineMoved(GpurunError):
    """Raised when the machine has a new address. The driver records the address and repeats the step."""

    def __init__(self, machine: Instance) -> None:
        what = f"{machine.provider} has {machine.id} at another address now, as after a restart"
        super().__init__("machine.moved", what, hint="Its host key is pinned, so the run continues there.")
        self.machine = machine


class StepClock:
    """A clock for steps that may be interrupted: `sleep` calls `between` every second."""

    def __init__(self, clock: Clock, between: Callable[[], None]) -> None:
        self._clock, self._between = clock, between

    def wall(self) -> float:
        """Return the wall time."""
        return self._clock.wall()

    def monotonic(self) -> float:
        """Return the monotonic time."""
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep in short parts, and call `between` before the first and after each; its error ends the sleep."""
        end_mono = self._clock.monotonic() + seconds
        self._between()
        while (left_s := end_mono - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left_s, BETWEEN_S))
            self._between()


@dataclass(frozen=True)
class Context:
    """Everything a step may use.

    - `reach` returns the connection to an instance. It does not connect yet.
    - `trainer` is the package to upload.
    - `open` opens the provider of another approved offer. If it is None, only the plan's first offer is tried.
    - `brings_early`: whether checkpoints are downloaded during training.
    - `ends_mono`: the end of the lease measured with the provider's clock, if that clock was read (see
      `ends_by_their_clock`).
    - `begin` starts a call that may take long.
    - `budgets` are checked before anything is rented.
    - `hang_up` closes every connection to the machine.
    - `abandoned` is set once the driver no longer waits for the step that has this context.
    - `latest` returns the run's current state. A long step may have an old one.
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
    begin: Begin = Inline
    budgets: Budgets = field(default_factory=Budgets)
    hang_up: Callable[[], None] = lambda: None
    abandoned: threading.Event = field(default_factory=threading.Event)
    latest: Callable[[RunState], RunState] = lambda state: state

    def for_machine(self, state: RunState) -> Context:
        """Return this context for the run's current offer, with the plan of its current machine."""
        context = self
        if state.leg_plan:
            try:
                plan = read_leg_plan(self.folder, state.leg_plan, state.leg_plan_sha256)
            except (OSError, ValueError):  # The journal has everything that is needed to end the machine.
                plan, _ = plan_of(self.folder, read_journal(self.folder.journal).records)
            context = replace(self, plan=plan)
        return context.on_offer(find_offer_place(state, context.plan))

    def on_offer(self, place: int) -> Context:
        """Return this context with the plan, lease and provider of the approved offer at index `place`."""
        approved = self.plan.approved
        if self.open is None or place >= len(approved):
            return self
        plan = self.plan.with_chosen(approved[place])
        return replace(self, plan=plan, provider=self.provider_of(plan.offer.provider, plan.offer.region))

    @property
    def is_shared(self) -> bool:
        """Return whether other programs may use the machine too: on this computer, an own box or a cluster."""
        traits = self.provider.traits
        return traits.is_this_computer or not traits.removes_files

    def provider_named(self, name: str) -> Provider:
        """Return the provider with this name: the current one, or one opened for another offer."""
        return self.provider if name == self.provider.name or self.open is None else self.open(name)

    def provider_of(self, name: str, region: str) -> Provider:
        """Return the provider of a machine in a region. The region matters if several clusters use one provider."""
        word = self.plan.choices.opened_as(name, region)
        return self.provider_named(name) if word == name or self.open is None else self.open(word)

    def has_offer(self, place: int) -> bool:
        """Return whether there is an approved offer at index `place`."""
        return self.open is not None and place < len(self.plan.approved)

    def seconds_left(self, state: RunState) -> float:
        """Return the seconds until the machine's end must be requested, to meet its deadline and the cap.

        The wall clock and the monotonic clock are both used; the smaller result counts.
        """
        state = self.latest(state)
        return real_seconds(self._lease_left_s(state), state, self.plan, self.clock)

    def is_lease_over(self, state: RunState) -> bool:
        """Return whether the lease is over while the machine works and its end is not yet requested."""
        return state.phase in WORKING and state.stop != "destroy" and self.seconds_left(state) <= 0

    def hold_left_s(self, state: RunState) -> float:
        """Return how many more seconds the machine is held: the smaller of both clocks' results, within its lease."""
        state = self.latest(state)
        if state.held_at is None or state.hold_until_wall is None:
            return 0.0
        whole_s, now_wall = state.hold_until_wall - state.held_at.wall, self.clock.wall()
        left_s = min(whole_s, state.hold_until_wall - now_wall)
        if state.held_at.boot_id == boot_id():
            left_s = min(left_s, whole_s - (self.clock.monotonic() - state.held_at.mono))
        return min(left_s, self.seconds_left(state))

    @property
    def collect_s(self) -> float:
        """Return the seconds of the lease that are reserved for downloading.

        It is the plan's figure, or more if this run downloads more slowly than planned. The longer time is at most half
        of the planned training time.
        """
        lease, seen = self.plan.lease, Inventory(self.folder).memory.bytes_per_s
        if not seen:
            return lease.collect_s
        needed_s = COLLECT_START_S + self.plan.job.home_bytes / seen
        return max(lease.collect_s, min(needed_s, lease.train_s / 2))

    def _lease_left_s(self, state: RunState) -> float:
        if state.deadline_wall is None or state.requested_at is None:
            return float("inf")
        ask_wall = self._ends_wall(state) - self.plan.lease.destroy_s
        by_wall = ask_wall - self.clock.wall()
        if state.requested_at.boot_id != boot_id():
            return min(by_wall, self.ends_mono - self.clock.monotonic())
        return min(by_wall, ask_wall - state.requested_at.wall - (self.clock.monotonic() - state.requested_at.mono))

    def _ends_wall(self, state: RunState) -> float:
        """Return the machine's deadline. If a cluster's job has started, it follows from the time of its start."""
        assert state.deadline_wall is not None
        started_wall = state.instance.started_wall if state.instance is not None else None
        return self.plan.lease.ends_wall(state.deadline_wall, started_wall)

    def ends_by_their_clock(self, state: RunState) -> float:
        """Return the monotonic time when the lease ends by the provider's clock; infinity if that is not needed.

        It is needed only after a reboot of this computer, because its own clock may be hours off. Without the
        provider's clock the result is infinity too. The monotonic clock is used because the wall clock may be corrected
        at any moment.
        """
        provider, deadline_wall = self.provider, state.instance.deadline_wall if state.instance else None
        is_of_this_boot = state.requested_at is not None and state.requested_at.boot_id == boot_id()
        if deadline_wall is None or is_of_this_boot or not isinstance(provider, TellsTime):
            return float("inf")
        with suppress(Exception):  # Without the provider's clock, the local clock decides when the lease ends.
            provider.ask_time()
        if provider.clock_ahead_s is None:
            return float("inf")
        left_s = deadline_wall - self.plan.lease.destroy_s - their_wall(provider, self.clock)
        return self.clock.monotonic() + left_s

    def paid_s(self, state: RunState) -> float:
        """Return the seconds for which the instance has been billed: the larger result of both clocks."""
        if state.deadline_wall is None or state.requested_at is None:
            return 0.0
        begun_wall = max(state.requested_at.wall, self._ends_wall(state) - self.plan.lease.total_s)
        return max(0.0, self._ends_wall(state) - self.plan.lease.destroy_s - begun_wall - self.seconds_left(state))

    def hidden_s(self, state: RunState) -> float:
        """Return for how many seconds the provider may still hide the new machine; 0 once its agent has replied."""
        return 0.0 if state.facts else self.unsettled_s(state)

    def unsettled_s(self, state: RunState) -> float:
        """Return for how long the provider may still hide what was requested with the machine, in seconds."""
        settle_s = self.provider.traits.settle_s
        if state.heard_at is None or state.heard_at.boot_id != boot_id():
            return settle_s
        return max(0.0, settle_s - (self.clock.monotonic() - state.heard_at.mono))

    def since_s(self, moment: Moment) -> float:
        """Return the seconds since a moment.

        The monotonic clock measures them; for a moment before the last boot, the wall clock.
        """
        if moment.boot_id == boot_id():
            return max(0.0, self.clock.monotonic() - moment.mono)
        return max(0.0, self.clock.wall() - moment.wall)

    def looks_late(self, state: RunState) -> bool:
        """Return whether the last reply is so old, by either clock, that the machine may have run since then."""
        now = Moment(wall=self.clock.wall(), mono=self.clock.monotonic(), boot_id=boot_id())
        since_s = state.heard_at.seconds_until(now) if state.heard_at is not None else float("inf")
        return since_s > max(UNSEEN_S, self.provider.traits.settle_s)

    def wants_stop(self, state: RunState) -> bool:
        """Return whether the user has requested a stronger stop than the one in the journal."""
        request = read_stop_request(self.folder)
        return request is not None and STRENGTH[request.how] > STRENGTH[state.stop_of_user]

    def must_end(self, state: RunState) -> bool:
        """Return whether the machine must end now: its lease is over, the user requested it, or no work is left."""
        request = read_stop_request(self.folder)
        if request is not None and STRENGTH[request.how] > STRENGTH[state.stop_of_user]:
            state = state.model_copy(update={"stop": request.how, "overdue": False})
        is_working = state.instance is not None and state.phase in WORKING
        is_known_late = bool(state.late or state.leftover) and not is_working
        lease_over = self.seconds_left(state) <= 0
        return is_known_late or state.stop == "destroy" or next_step(state, lease_over=lease_over) is Step.DESTROY

    def raise_if_stopped(self, state: RunState) -> None:
        """Raise StopWanted if a stop request is not yet in the journal, or if the driver has abandoned this step."""
        if self.abandoned.is_set() or self.wants_stop(state):
            raise StopWanted

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder on the machine that holds the guard's timer; "" if the provider has no guard."""
        return self.provider.guard_folder(instance) if isinstance(self.provider, Guarded) else ""

    def timer_of(self, state: RunState) -> str:
        """Return the guard's folder on the run's machine; "" if there is no guard or the agent was never reached.

        The folder may be named after the deadline on the provider's clock.
        """
        if not state.facts or state.instance is None or state.instance.address is None:
            return ""
        return self.guard_folder(state.instance)

    def is_down(self, state: RunState) -> str | None:
        """Ask the provider why the machine does not answer. Return the reason, "" if the machine runs, None if unknown.

        If the provider's replies contradict each other, the machine counts as running. Raise StopWanted if a stop was
        requested or the lease is over, because that may be why the machine is down. Raise MachineMoved if the machine
        has a new address. Before that, have the provider admit this computer's address, which may have changed.
        """
        known = get_instance(state)
        if isinstance(self.provider, LetsIn):
            with suppress(Unknown, Rejected, SetupError):
                self.provider.let_in(known)
        try:
            machine = self.provider.read(known.id)
            why = self._explain_why_down(machine, known)
        except (Unknown, Rejected, SetupError):
            return None
        if why and (self.wants_stop(state) or self.is_lease_over(state)):
            raise StopWanted
        if not why and _has_moved(machine, known):
            raise MachineMoved(machine)
        return why

    def is_ended_by_user(self, state: RunState) -> bool:
        """Return whether the run's own user ended its machine outside of gpurun, as far as the provider reports that.

        Such a run does not move to another machine, because the user wanted it to end.
        """
        return isinstance(self.provider, TellsWhoEnded) and self.provider.was_ended_by_user(get_instance(state))

    def _explain_why_down(self, machine: Instance, known: Instance) -> str:
        name, said = self.provider.name, machine.said
        if machine.state is InstanceState.PENDING and self.plan.lease.queue_s:
            return f"it was put back into the queue, {name} says: {said}"
        if machine.state not in (InstanceState.STOPPED, InstanceState.GONE):
            return ""
        if machine.state is InstanceState.GONE:
            if any(instance.state is not InstanceState.GONE for instance in self.provider.find(known.token)):
                return ""
            ended = TAKEN if self.plan.offer.spot else ENDED
            ended = self._describe_used_up_balance() or ended
            return f"{ended}, {name} says{f': {said}' if said else ''}"
        ended = self._describe_used_up_balance() or (TAKEN_BACK if self.plan.offer.spot else "")
        return f"{ended}{', ' if ended else ''}{name} says that it is {said or 'stopped'}"

    def _describe_used_up_balance(self) -> str:
        """Return a phrase if the prepaid balance is used up (the provider then ends all machines), else ""."""
        with suppress(Unknown, Rejected, SetupError):
            left = self.provider.verify().balance_micros
            if left is not None and left <= 0:
                return f"the balance at {self.provider.name} is used up ({format_left(left)} left)"
        return ""


def _has_moved(machine: Instance, known: Instance) -> bool:
    """Return whether a running machine has a new address, for example after a restart."""
    now, before = machine.address, known.address
    return machine.state is InstanceState.RUNNING and now is not None and before is not None and now != before


def get_instance(state: RunState) -> Instance:
    """Return the instance in the journal. Without one, raise RuntimeError: the steps then ran in a wrong order."""
    if state.instance is None:
        raise RuntimeError(f"run {state.run} is {state.phase} without an instance")
    return by_our_clock(state.instance, state)


def by_our_clock(instance: Instance, state: RunState) -> Instance:
    """Return the instance with the journal's deadline, which is on the local clock."""
    return instance.model_copy(update={"deadline_wall": state.deadline_wall})


def real_seconds(lease_left_s: float, state: RunState, plan: Plan, clock: Clock) -> float:
    """Return the seconds until the machine's end must be requested to keep the cap; at most `lease_left_s`.

    Extra machines and price rises shorten the time. Their cost is converted into seconds of the run's own machine at
    the agreed price. For example, a second machine of the same price that ran for a minute shortens the time by a
    minute, and while it runs each second counts twice. Money that the cap leaves above the worst case is used first.
    The time after the request (`destroy_s` and the kill allowance) is counted at the current price as well.
    """
    own = state.attempts.get(state.token)
    price = total(own.micros_per_hour, own.beside_micros_per_hour) if own is not None else None
    cap, extras = plan.cap_left_micros, _extras_of_this_leg(state)
    if own is None or not price or cap is None or not (extras or state.dearer):
        return lease_left_s
    now = Moment(wall=clock.wall(), mono=clock.monotonic(), boot_id=boot_id())
    tail_s = plan.lease.destroy_s + plan.lease.kill_allowance_s
    burn, taken_s = 1.0, 0.0
    for rise in state.dearer:
        before, burn = burn, ratio_of(total(rise.micros_per_hour, own.beside_micros_per_hour), price)
        taken_s += (burn - before) * (max(0.0, now.wall - rise.since_wall) + tail_s)
    for extra in extras:
        attempt = state.attempts.get(extra.token)
        if attempt is None:  # A journal of version 1 does not record create requests.
            continue
        # For a machine that is still being ended, the usual time for ending is added to the time that it has run.
        lived_s = attempt.at.seconds_until(extra.ended or now) + (tail_s if extra.ended is None else 0.0)
        share = ratio_of(total(attempt.micros_per_hour, attempt.beside_micros_per_hour), price)
        taken_s += share * (lived_s + attempt.billing_unit_s)
    spare_s = seconds_within(left_of(cap, total(own.worst_micros, own.spent_micros)), price)
    return min(lease_left_s, (lease_left_s + spare_s - taken_s) / burn)


def _extras_of_this_leg(state: RunState) -> list[Extra]:
    """Return the extra machines whose cost is not included in the cost of earlier legs."""
    return [
        extra
        for extra in state.extras.values()
        if state.leg_at is None
        or extra.ended is None
        or extra.ended.wall > state.leg_at.wall
        or (extra.token in state.attempts and state.attempts[extra.token].leg == state.leg)
    ]


def spent_at_most(state: RunState, records: Sequence[Record], leg: int) -> Micros:
    """Return the upper bound of what all machines cost so far.

    A machine of an earlier leg whose create request had no clear reply counts with its worst case.
    """
    spent = []
    for rental in rentals_of(records):
        whole = Micros(rental.intent.worst_micros) if _is_unclear(rental, state, leg) else Micros(0)
        spent.append(max(rental.micros, whole))
    return total(*spent)


def gpu_hours_at_most(state: RunState, records: Sequence[Record], leg: int) -> float:
    """Return the upper bound of the GPU-hours that all machines used so far, counted like `spent_at_most`."""
    return sum(
        rental.longest_gpu_hours if _is_unclear(rental, state, leg) else rental.most_gpu_hours
        for rental in rentals_of(records)
    )


def _is_unclear(rental: Rental, state: RunState, leg: int) -> bool:
    """Return whether this machine's create request belongs to an earlier leg and was never clearly answered."""
    attempt = state.attempts.get(rental.token)
    return attempt is not None and attempt.leg < leg and attempt.answer in ("", "unseen")


def pays_for_another(state: RunState, cap_micros: Micros | None, worst_micros: Micros) -> bool:
    """Return whether the cap covers another machine's worst case plus that of each machine that may exist unseen.

    `cap_micros` must already be reduced by the cost of earlier legs.
    """
    requests = [request for request in state.attempts.values() if request.leg == state.leg]
    unseen = [request for request in requests if request.answer == "unseen" or request.token == state.token]
    worst = total(worst_micros, *(request.worst_micros for request in unseen))
    return cap_micros is None or not unseen or worst <= cap_micros
