"""Check a run's machines at the provider during the whole run: for a second machine, a price rise, a new status.

A provider's list may be old, so a single check when the machine is ready does not prove that there is no second
machine. An extra machine has a token of this run but is not the run's machine. It is ended, and the run's remaining
time is shortened by its cost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from gpurun.core.background_call import Task
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.journal_events import ExtraGone, Incident, PriceRose
from gpurun.core.journal_records import CreateAttempt, Phase, RunState
from gpurun.core.records import Instance, InstanceState
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.lifecycle.instance.readings import InstanceReading, are_proof, look_at_instance
from gpurun.lifecycle.instance.terminate import extra_machine_incident
from gpurun.lifecycle.job_spec import stops_of
from gpurun.providers.base import FindsInRegions, Provider, Rejected, Throttled, Unknown
from gpurun.remote.interface import FarRefusal, MachineLost

SOON_S, LATER_S, LONGEST_S = 20.0, 120.0, 600.0
JITTER = 0.2
_CHANGED_S = 1.0


@dataclass
class _Seen:
    """The result of one check: new extra machines, ids of extra machines proven gone, and the run's machine."""

    alive: list[Instance] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    machine: Instance | None = None
    is_throttled: bool = False


class Monitor:
    """Runs the checks of one supervisor. The driver calls `turn` whenever it waits for a step."""

    def __init__(self, run: str) -> None:
        self._chance = Random(run)  # Spreads the checks of several runs in one account.
        self._next_mono = float("-inf")
        self._slower = 1.0
        self._looking: Task[_Seen] | None = None
        self._listed: set[str] = set()
        self._readings: dict[str, list[InstanceReading]] = {}
        self._price_wall: float | None = None
        self._last_status = ""
        self._announced_wall = float("inf")

    def is_due(self, now_mono: float) -> bool:
        """Return whether `turn` would do anything now."""
        return self._looking is not None or now_mono >= self._next_mono

    def turn(self, state: RunState, context: Context) -> Iterator[Note]:
        """Start a check, or yield the notes of a check that has finished.

        The notes report extra machines. The next check ends those that the journal has.
        """
        if self._looking is None:
            self._looking = context.begin(lambda: self._read_machines(state, context))
        if not self._looking.wait(0.0):
            return
        looked, self._looking = self._looking, None
        try:
            seen = looked.result()
        except Exception as bug:
            logging.error("A look at the provider failed.", exc_info=bug)
            seen = _Seen()
        self._next_mono = context.clock.monotonic() + self._pause_s(state, context, seen)
        for extra in seen.alive:
            yield extra_machine_incident(extra)
        for name in seen.gone:
            gone, token = f"{name} is proven gone", state.extras[name].token
            yield ExtraGone(code="create.duplicate_gone", message=gone, id=name, token=token)
        yield from self._own_machine_notes(seen.machine, state, context)

    def _pause_s(self, state: RunState, context: Context, seen: _Seen) -> float:
        """Return the seconds until the next check: 0 after a find, few while a machine may still appear, else more."""
        if seen.alive:
            return 0.0
        if state.late:
            return context.provider.traits.poll_s
        self._slower = self._slower * 2 if seen.is_throttled else 1.0
        usual_s = SOON_S if context.unsettled_s(state) > 0 else LATER_S
        return min(LONGEST_S, usual_s * self._slower) * (1.0 + JITTER * self._chance.random())

    def _read_machines(self, state: RunState, context: Context) -> _Seen:
        """Read the run's machines at every provider that it used.

        Also request the end of the extra machines in the journal.
        """
        seen, listed = _Seen(), set[str]()
        own = state.instance.id if state.instance is not None else ""
        by_place = dict[str, list[CreateAttempt]]()
        for attempt in state.attempts.values():
            by_place.setdefault(context.plan.choices.opened_as(attempt.provider, attempt.region), []).append(attempt)
        for attempts in by_place.values():
            if all(attempt.answer == "refused" for attempt in attempts):
                continue
            provider = context.provider_of(attempts[0].provider, attempts[0].region)
            tokens = {attempt.token for attempt in attempts}
            for second in self._find_extras(provider, state, own, seen):
                listed.add(second.id)
                if second.id not in state.extras and (second.id in self._listed or _is_alive(provider, second)):
                    seen.alive.append(second)
            for extra, token in state.late.items():
                if token in tokens and self._end_extra(provider, extra, token, own, context):
                    seen.gone.append(extra)
        self._listed = listed
        if state.facts and own:
            with suppress(Unknown, Rejected, SetupError):
                seen.machine = context.provider.read(own)
            self._shorten_training(state, context)
        return seen

    def _find_extras(self, provider: Provider, state: RunState, own: str, seen: _Seen) -> list[Instance]:
        """Return the living machines with the run's tokens, except the one that is or may become its own machine."""
        tokens = {attempt.token for attempt in state.attempts.values()} - (set() if own else {state.token})
        try:
            found = self._list(provider, state)
        except Unknown as error:
            seen.is_throttled = seen.is_throttled or isinstance(error, Throttled)
            found = list(error.found)
        except SetupError:
            return []
        alive = [
            instance for instance in found if instance.state is not InstanceState.GONE and instance.token in tokens
        ]
        return [instance for instance in alive if instance.id != own]

    def _list(self, provider: Provider, state: RunState) -> list[Instance]:
        """Return gpurun's machines at a provider.

        If each region needs its own request, read only the regions that the run used.
        """
        if isinstance(provider, FindsInRegions):
            regions = [attempt.region for attempt in state.attempts.values() if attempt.provider == provider.name]
            return provider.find_in(tuple(dict.fromkeys(regions)))
        return provider.find(None)

    def _end_extra(self, provider: Provider, name: str, token: str, own: str, context: Context) -> bool:
        """Request the end of an extra machine. Return whether its end is proven."""
        with suppress(Unknown, Rejected, SetupError):
            provider.destroy(name)
        reading = look_at_instance(provider, name, token, context.clock.monotonic(), but=own)
        readings = self._readings.setdefault(name, [])
        readings.append(reading)
        if not reading.gone:
            readings.clear()
        return are_proof(provider, readings)

    def _own_machine_notes(self, machine: Instance | None, state: RunState, context: Context) -> Iterator[Note]:
        """Yield a note if the price of the run's machine has risen, or if its provider shows an unusual status."""
        if machine is None or state.instance is None or machine.token not in ("", state.token):
            return
        rate, now_wall = machine.rate_micros_per_hour, context.clock.wall()
        known = state.dearer[-1].micros_per_hour if state.dearer else context.plan.offer.rate_micros_per_hour
        if rate is not None and rate > known:
            heard_wall = state.heard_at.wall if state.heard_at is not None else now_wall
            since_wall = heard_wall if self._price_wall is None else self._price_wall
            message = f"{machine.provider} now charges more for {machine.id}; its remaining time is counted at it"
            yield PriceRose(
                message=message, rate_micros_per_hour=rate, since_wall=since_wall, id=machine.id, token=state.token
            )
        if rate is not None:
            self._price_wall = now_wall
        said = machine.said or str(machine.state)
        is_odd = machine.state is not InstanceState.RUNNING or said.lower() not in ("", "running", "active")
        if is_odd and said != self._last_status:
            message = f"{machine.provider} says of {machine.id} while it trains: {said}"
            yield Incident(code="machine.said", message=message)
        self._last_status = said

    def _shorten_training(self, state: RunState, context: Context) -> None:
        """Have the agent end training earlier if less time is left, because of an extra machine or slow downloads."""
        if state.hard_stop_wall is None or state.phase is not Phase.TRAINING:
            return
        soft_s, hard_s = stops_of(state, context)
        there_wall = context.clock.wall() + state.clock_ahead_s
        announced_wall = min(self._announced_wall, state.hard_stop_wall)
        if there_wall + hard_s > announced_wall - _CHANGED_S:
            return
        with suppress(MachineLost, FarRefusal, GpurunError):  # The next check tries again.
            context.reach(get_instance(state)).shorten(there_wall + soft_s, there_wall + hard_s)
            if folder := context.timer_of(state):
                ends_wall = there_wall + context.seconds_left(state) + context.plan.lease.destroy_s
                context.reach(get_instance(state)).end(folder, ends_wall)
            self._announced_wall = there_wall + hard_s


def _is_alive(provider: Provider, listed: Instance) -> bool:
    """Return whether reading a listed machine confirms that it is alive."""
    try:
        machine = provider.read(listed.id)
    except (Unknown, Rejected, SetupError):
        return False
    return machine.token == listed.token and machine.state is not InstanceState.GONE
