"""A simulated cloud with the faults of real ones, in virtual time; its own meter is always right.

A `Profile` holds how one real provider behaves; a script or a nemesis decides which call gets which fault. Which
machines exist, what they cost and when a timer fires depend only on true time, whatever gpurun believes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpurun.core.clock import Clock
from gpurun.core.money import Micros, cost_of, times, total
from gpurun.core.records import Account, Address, Charge, GpuNeed, Instance, InstanceState, Leftover, Offer, Order
from gpurun.providers.base import NoCapacity, Rejected, Unknown
from tests.emulators.fake.boxes import Box, Fault, Thing, revoked, thing_of
from tests.emulators.fake.profile import Profile

CALL_S = 0.2


@dataclass
class FakeCloud:
    """A cloud with six verbs, side resources and a timer; every call takes a little virtual time.

    - `script` holds the next faults of each verb; when none is left, `nemesis` returns the fault.
    - `passing` is called at the beginning and at the end of a call, and may raise to kill the caller.
    - `outages`, `refusals` and `denials` are spans of true seconds. In an outage no call gets an answer; in a refusal
      no termination is granted, not even to a timer that needs the API; in a denial, reads and lists do not show a
      machine that has answered its user before.
    - `list_s` is how long a list takes; `account` is what `account_mark` returns.
    - `laptop` is the caller's clock if it may differ from true time.
    """

    profile: Profile
    clock: Clock
    script: dict[str, list[Fault]] = field(default_factory=dict)
    nemesis: Callable[[str], Fault] = lambda verb: Fault.NONE
    passing: Callable[[str], None] = lambda place: None
    outages: list[tuple[float, float]] = field(default_factory=list)
    refusals: list[tuple[float, float]] = field(default_factory=list)
    denials: list[tuple[float, float]] = field(default_factory=list)
    stock: Sequence[Offer] = ()
    account: str = "account:simulated"
    laptop: Clock | None = None
    guard_shares_key: bool = False
    list_s: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    things: list[Thing] = field(default_factory=list)
    history: list[tuple[float, str, str]] = field(default_factory=list)
    _late: list[tuple[float, Order]] = field(default_factory=list)
    _epoch: float = 0.0

    def __post_init__(self) -> None:
        """Take the true time from `clock` now; a later change of its wall time affects only the laptop."""
        self.name, self.traits = self.profile.name, self.profile.traits
        self._epoch = self.clock.wall() - self.clock.monotonic()

    def verify(self) -> Account:
        """Return the account of the key."""
        self._ends("verify", self._begins("verify"))
        return Account(provider=self.name, identity="simulated")

    def offers(self, need: GpuNeed, known: Sequence[Offer] = ()) -> list[Offer]:
        """Return the whole stock, whatever is needed."""
        self._ends("offers", self._begins("offers"))
        return list(self.stock)

    def create(self, order: Order) -> Instance:
        """Create a box, as far as the fault of this call permits.

        The side resources are created first, and stay even if no box is created.
        """
        fault = self._begins("create")
        self._leave_things(order)
        if fault is Fault.FULL:
            raise NoCapacity("sold out")
        if fault is Fault.REFUSED:
            raise Rejected("no such type")
        if fault is Fault.LATE:
            self._late.append((self.now + self.profile.late_s, order))
            self._time_out("create")
        if fault is Fault.NOWHERE:
            return self._absent(f"i-{self.name}-none").model_copy(
                update={"token": order.token, "run": order.run, "state": InstanceState.PENDING}
            )
        box = self._make(order, fault, self.now)
        if fault is Fault.TWICE:
            self._make(order, fault, self.now)
        if fault is Fault.STILLBORN:
            self._end(box, self.now)
        self._ends("create", fault)
        instance = self._told(box, self.now, "create")
        return instance.model_copy(update={"token": "gr-other-1"}) if fault is Fault.OF_ANOTHER else instance

    def find(self, token: str | None) -> list[Instance]:
        """List the boxes of a token, oldest first; None lists all boxes."""
        fault = self._begins("find")
        self.clock.sleep(self.list_s)
        at_s = self._view_s(fault) - self.profile.list_lag_s
        shown = [box for box in self.boxes if token in (None, box.order.token) and self._is_listed(box, at_s)]
        self._ends("find", fault)
        return [] if fault is Fault.DENIED else [self._told(box, at_s, "find") for box in shown]

    def read(self, instance_id: str) -> Instance:
        """Return one box; its state is GONE if it is hidden or never existed."""
        fault = self._begins("read")
        at_s = self._view_s(fault)
        box = next((box for box in self.boxes if box.id == instance_id), None)
        self._ends("read", fault)
        is_denied = fault is Fault.DENIED or (box is not None and self._is_denied(box))
        if box is None or is_denied or at_s < box.born_s + self.profile.hidden_s:
            return self._absent(instance_id)
        return self._told(box, at_s, "read")

    def _absent(self, instance_id: str) -> Instance:
        return Instance(id=instance_id, provider=self.name, token="", run="", state=InstanceState.GONE)

    def destroy(self, instance_id: str) -> None:
        """Begin the end of a box; while the box is hidden, the call has no effect."""
        fault = self._begins("destroy")
        if self._is_in(self.refusals, self.now):
            raise Unknown("503 the request could not be processed")
        for box in self.boxes:
            is_known = self.now >= box.born_s + self.profile.hidden_s and not self._is_denied(box)
            if box.id == instance_id and fault is not Fault.DEAF and is_known:
                self._end(box, self.now)
        self._ends("destroy", fault)

    def leftovers(self, token: str | None) -> list[Leftover]:
        """List the side resources of a token; None lists all."""
        fault = self._begins("leftovers")
        at_s = self._view_s(fault)
        there = [t.leftover for t in self.things if t.made_s <= at_s and (t.removed_s is None or t.removed_s > at_s)]
        self._ends("leftovers", fault)
        return [] if fault is Fault.DENIED else [thing for thing in there if token in (None, thing.token)]

    def remove(self, leftover: Leftover) -> None:
        """Remove a side resource; raise Unknown while a machine of its token lives."""
        fault = self._begins("remove")
        if any(box.order.token == leftover.token for box in self.alive):
            raise Unknown("DependencyViolation")
        for thing in self.things:
            if thing.leftover == leftover and thing.removed_s is None and fault is not Fault.DEAF:
                thing.removed_s = self.now
        self._ends("remove", fault)

    def charges(self, instance_id: str, from_wall: float, to_wall: float) -> Charge | None:
        """Return the bill of one box, which lags by `bill_lag_s`; None if there is none yet."""
        self._ends("charges", self._begins("charges"))
        lag_s = self.profile.bill_lag_s
        box = next((box for box in self.boxes if box.id == instance_id), None)
        if box is None or lag_s is None or self.now - lag_s < box.born_s:
            return None
        return Charge(provider=self.name, instance_id=box.id, micros=self.bill(box, self.now - lag_s), settled=False)

    @property
    def clock_ahead_s(self) -> float:
        """Return by how many seconds the laptop's clock is ahead of true time."""
        return (self.laptop or self.clock).wall() - self.clock.monotonic() - self._epoch

    def ask_time(self) -> None:
        """Do nothing, because the true time is known here."""

    def account_mark(self) -> str:
        """Return the mark of the key's account."""
        return self.account

    def guard_folder(self, instance: Instance) -> str:
        """Return the folder where the timer of a box keeps its deadline; "" if this cloud has no timer."""
        return "" if self.profile.timer == "none" else "/var/lib/gpurun"

    def bring_forward(self, instance_id: str, at_wall: float) -> float | None:
        """Move the timer of a box to an earlier wall time and return when it now fires; None if no timer is armed."""
        for box in self.alive:
            if box.id == instance_id and box.ends_s is not None:
                box.ends_s = min(box.ends_s, max(self.now, at_wall - self._epoch))
                return self._epoch + box.ends_s
        return None

    def kill_guards(self) -> None:
        """Disarm the timer of every machine, as root on a machine can."""
        for box in self.alive:
            box.ends_s = None

    @property
    def now(self) -> float:
        """Return the true time in seconds."""
        return self.clock.monotonic()

    @property
    def alive(self) -> list[Box]:
        """Return the boxes that are alive now."""
        self._come_true()
        return [box for box in self.boxes if box.died_s is None or box.died_s > self.now]

    def metered(self, token: str | None = None) -> Micros:
        """Return what the cloud will bill up to now for a token; None adds up all boxes."""
        self._come_true()
        return total(*(self.bill(box) for box in self.boxes if token in (None, box.order.token)))

    def take(self) -> None:
        """End every box, as a provider may at any time."""
        for box in self.alive:
            self._end(box, self.now)

    def bill(self, box: Box, by_s: float | None = None) -> Micros:
        """Return what one box costs up to `by_s` (default: now), by the billing unit and the minimum that is billed."""
        by_s = self.now if by_s is None else by_s
        until_s = by_s if box.died_s is None else min(box.died_s, by_s)
        return cost_of(box.rate, max(until_s - box.born_s, self.profile.least_billed_s), self.profile.billing_unit_s)

    def _begins(self, verb: str) -> Fault:
        """Begin a call and return its fault; raise the faults that prevent the call from arriving."""
        self.passing(f"before {verb}")
        self.clock.sleep(CALL_S)
        self._come_true()
        waiting = self.script.get(verb)
        fault = waiting.pop(0) if waiting else self.nemesis(verb)
        self.history.append((self.now, verb, fault))
        if fault is Fault.DROPPED or self._is_in(self.outages, self.now):
            self._time_out(verb)
        if fault is Fault.BUSY:
            self.clock.sleep(self.profile.timeout_s)
            raise Unknown("429 Too Many Requests")
        if fault is Fault.REVOKED:
            raise revoked()
        return fault

    def _ends(self, verb: str, fault: Fault) -> None:
        """End a call that took effect; raise the faults that hide the effect from the caller."""
        self.passing(f"after {verb}")
        if fault is Fault.LOST:
            self._time_out(verb)
        if fault is Fault.BROKEN:
            raise KeyError("id")
        if fault is Fault.REVOKED_AFTER:
            raise revoked()

    def _time_out(self, verb: str) -> None:
        self.clock.sleep(self.profile.timeout_s)
        raise Unknown(f"504 Gateway Timeout ({verb})")

    def _is_in(self, times: list[tuple[float, float]], at_s: float) -> bool:
        return any(start <= at_s < end for start, end in times)

    def _view_s(self, fault: Fault) -> float:
        """Return the moment that an answer describes."""
        return self.now - self.profile.stale_s if fault is Fault.STALE else self.now

    def _make(self, order: Order, fault: Fault, at_s: float) -> Box:
        """Create a box born at `at_s`; if the provider is idempotent, return the box that the token already has."""
        same = next((box for box in self.boxes if box.order.token == order.token), None)
        if same is not None and self.profile.idempotent:
            return same
        offer = order.offer
        box = Box(
            id=f"i-{self.name}-{len(self.boxes) + 1}",
            order=order,
            rate=times(offer.rate_micros_per_hour, 2 if fault is Fault.DEARER else 1),
            born_s=at_s,
            up_s=at_s + self.profile.boot_s,
            gpu="T4" if fault is Fault.OTHER_GPU else offer.gpu,
            gpu_count=offer.gpu_count,
            works=fault is not Fault.NO_TIMER,
        )
        if self.profile.timer == "boot" and box.works:
            box.ends_s = self._deadline_s(box)
        self.boxes.append(box)
        return box

    def _deadline_s(self, box: Box) -> float:
        """Return when the timer of a box fires: at the deadline, or a lease after its boot if that is earlier."""
        by_wall = box.order.deadline_wall - self._epoch
        by_lease = box.up_s + box.order.lease_s if box.order.lease_s else by_wall
        return max(box.up_s, min(by_wall, by_lease))

    def _end(self, box: Box, at_s: float) -> None:
        """Begin the end of a box; a second call changes nothing."""
        if box.died_s is None:
            box.asked_s, box.died_s = at_s, at_s + self.profile.dying_s

    def _come_true(self) -> None:
        """Carry out what is due: requests that arrive late, and timers that fire."""
        for at_s, order in [due for due in self._late if due[0] <= self.now]:
            self._late.remove((at_s, order))
            self._make(order, Fault.LATE, at_s)
        for box in self.boxes:
            if box.ends_s is not None and box.ends_s <= self.now and box.died_s is None:
                self._end(box, self._when_granted(box.ends_s))

    def _when_granted(self, at_s: float) -> float:
        """Return when a timer that fires at `at_s` ends its machine.

        A timer that needs the API retries until outages, refusals and denials are over.
        """
        times = [*self.outages, *self.refusals, *self.denials]
        while self.profile.timer_needs_api and self._is_in(times, at_s):
            at_s = max(end for start, end in times if start <= at_s < end)
        return at_s

    def _is_denied(self, box: Box) -> bool:
        """Return whether every verb denies this box now, although it has answered its user."""
        return box.answered and self._is_in(self.denials, self.now)

    def _is_listed(self, box: Box, at_s: float) -> bool:
        """Return whether a list as of `at_s` contains the box; some clouds list dead machines for a long time."""
        born = at_s >= box.born_s + self.profile.hidden_s and not self._is_denied(box)
        return born and (box.died_s is None or at_s < box.died_s + self.profile.tomb_s)

    def _told(self, box: Box, at_s: float, verb: str) -> Instance:
        """Return the box as an answer of `verb` shows it at `at_s`."""
        state = InstanceState.RUNNING if at_s >= box.up_s else InstanceState.PENDING
        if box.asked_s is not None and at_s >= box.asked_s:
            state = InstanceState.STOPPING
        if box.died_s is not None and at_s >= box.died_s:
            state = InstanceState.GONE
        ended_s = box.died_s if state is InstanceState.GONE else None
        return Instance(
            id=box.id,
            provider=self.name,
            token=box.order.token,
            run=box.order.run,
            state=state,
            address=Address(kind="folder", folder=box.id),
            gpu=box.gpu,
            gpu_count=box.gpu_count,
            type_id=box.order.offer.type_id,
            rate_micros_per_hour=self._told_rate(box, verb),
            created_wall=self._epoch + box.born_s,
            deadline_wall=box.order.deadline_wall,
            region=box.order.offer.region,
            ended_wall=float(int(self._epoch + ended_s)) if self.profile.tells_end and ended_s is not None else None,
        )

    def _told_rate(self, box: Box, verb: str) -> Micros | None:
        """Return the price per hour in an answer of `verb`; a test can override this to let verbs differ."""
        return box.rate if self.profile.tells_rate else None

    def _leave_things(self, order: Order) -> None:
        for kind in self.profile.leaves:
            left = thing_of(self.name, kind, order, self.now)
            if all(thing.leftover.id != left.leftover.id for thing in self.things):
                self.things.append(left)
