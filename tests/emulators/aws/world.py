"""The instances in time: pending, running, ending, ended; what each costs; and the schedules that end them.

moto holds what is told of an instance; when that changes is decided here, by one clock.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpurun.core.clock import Clock
from tests.emulators.aws.guest import Boot, FakeGuest, Guest, Machine
from tests.emulators.guests import Meter

ACCOUNT = "123456789012"
_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
LEAST_BILLED_S = 60
BY_USER = "Client.UserInitiatedShutdown"


@dataclass
class Launched:
    """One instance. `shutdown` is what its own power-off means."""

    id: str
    region: str
    zone: str
    type_id: str
    token: str
    shutdown: str
    user_data: str
    gpu_count: int
    launched: float
    spot_usd: str = ""
    """The maximum price of its spot request; "" on demand."""
    state: str = "pending"
    ending: float | None = None
    ended: float | None = None
    guest: Guest | None = None


def spot_request(identifier: str) -> str:
    """The id of the request by which a spot instance was made."""
    return f"sir-{identifier[2:10]}"


class World:
    """All instances of the one account. Every method is called under `lock`, but for a guest's own power-off."""

    def __init__(self, clock: Clock, boot: Boot) -> None:
        self.clock, self.boot = clock, boot
        self.lock = threading.RLock()
        self.instances: dict[str, Launched] = {}
        self.meter = Meter(clock.wall)
        self.pending_s, self.dying_s, self.tomb_s, self.hidden_s = 0.0, 0.0, 3600.0, 0.0
        self.never_boots = False
        self.fired: list[str] = []
        self._powered_off: list[str] = []

    @property
    def requests(self) -> dict[str, Launched]:
        """The spot requests, each with its instance."""
        return {spot_request(one.id): one for one in self.instances.values() if one.spot_usd}

    @property
    def alive(self) -> list[Launched]:
        """What is billed, or was stopped and still has its disk: the oracle of a test."""
        return [one for one in self.instances.values() if one.state != "terminated"]

    def add(self, one: Launched, rate_micros: int) -> None:
        """An instance that moto has just made: it is billed from now on."""
        self.instances[one.id] = one
        inner = self._inner(one)
        inner.launch_time = datetime.fromtimestamp(self.clock.wall(), UTC)
        self._say(one, "pending")
        for card in inner.nics.values():
            card.public_ip = None
        self.meter.start(one.id, rate_micros, 1, LEAST_BILLED_S)

    def hidden(self, one: Launched) -> bool:
        """Whether it was made so recently that it is not told of yet."""
        return self.clock.wall() - one.launched < self.hidden_s

    def end(self, identifier: str, code: str = BY_USER) -> None:
        """Begin to terminate; nothing new for what is ending or ended."""
        one = self.instances[identifier]
        if one.state in ("shutting-down", "terminated"):
            return
        one.ending = self.clock.wall()
        self._say(one, "shutting-down", code)
        if one.guest is not None:
            one.guest.kill()
        self.tick()

    def interrupt(self, identifier: str) -> None:
        """AWS takes a spot instance away."""
        self.end(identifier, "Server.SpotInstanceTermination")

    def tick(self) -> None:
        """Let happen what is due."""
        now = self.clock.wall()
        self._fire(now)
        for one in list(self.instances.values()):
            if isinstance(one.guest, FakeGuest):
                one.guest.tick(now)
        while self._powered_off:
            self._obey_poweroff(self._powered_off.pop())
        for one in list(self.instances.values()):
            if one.state == "pending" and not self.never_boots and now - one.launched >= self.pending_s:
                self._start(one)
            if one.state == "shutting-down" and now - (one.ending or now) >= self.dying_s:
                self._finish(one)
            if one.ended is not None and now - one.ended >= self.tomb_s:
                self._forget(one)

    def close(self) -> None:
        """End every guest."""
        for one in self.instances.values():
            if one.guest is not None:
                one.guest.kill()

    def _start(self, one: Launched) -> None:
        one.guest = self.boot(Machine(one.id, one.type_id, one.gpu_count, one.user_data, self._hears(one.id)))
        self._say(one, "running")
        for card in self._inner(one).nics.values():
            card.public_ip = one.guest.host

    def _hears(self, identifier: str) -> Callable[[], None]:
        """What a guest calls when it powers itself off: taken down here, obeyed with the next tick."""
        return lambda: self._powered_off.append(identifier)

    def _obey_poweroff(self, identifier: str) -> None:
        one = self.instances.get(identifier)
        if one is None or one.state != "running":
            return
        if one.shutdown == "terminate":
            one.ending = self.clock.wall()
            self._say(one, "shutting-down", "Client.InstanceInitiatedShutdown")
        else:
            self._say(one, "stopped", "Client.InstanceInitiatedShutdown")
            self.meter.stop(one.id)

    def _finish(self, one: Launched) -> None:
        code = self._inner(one).state_reason.code
        self._inner(one).terminate()
        one.ended = self.clock.wall()
        self.meter.stop(one.id)
        self._say(one, "terminated", code)

    def _forget(self, one: Launched) -> None:
        """It is no longer told of at all."""
        reservations = self._backend(one.region).reservations
        for name, held in list(reservations.items()):
            if any(inner.id == one.id for inner in held.instances):
                del reservations[name]

    def _say(self, one: Launched, state: str, code: str = "") -> None:
        from moto.ec2.models.instances import InstanceState, StateReason

        one.state = state
        inner = self._inner(one)
        inner._state = InstanceState(state, _CODES[state])
        stamp = datetime.fromtimestamp(self.clock.wall(), UTC).strftime("%Y-%m-%d %H:%M:%S GMT")
        words = "User initiated" if code.startswith("Client.") else code
        inner._reason = f"{words} ({stamp})" if code else ""
        inner.state_reason = StateReason(f"{code}: {code.partition('.')[2]}" if code else "", code)

    def _fire(self, now: float) -> None:
        """The one-time schedules that are due end their instances, and themselves if they were told to."""
        from moto.scheduler.models import scheduler_backends

        for region, backend in scheduler_backends[ACCOUNT].items():
            for group in backend.schedule_groups.values():
                for schedule in list(group.schedules.values()):
                    at = datetime.fromisoformat(schedule.schedule_expression[3:-1]).replace(tzinfo=UTC).timestamp()
                    if now < at or schedule.name in self.fired:
                        continue
                    self.fired.append(schedule.name)
                    for identifier in json.loads(schedule.target["Input"])["InstanceIds"]:
                        if self.instances.get(identifier) and self.instances[identifier].region == region:
                            self.end(identifier)
                    if schedule.action_after_completion == "DELETE":
                        group.schedules.pop(schedule.name, None)

    def _inner(self, one: Launched) -> Any:
        """moto's own record of an instance."""
        for held in self._backend(one.region).reservations.values():
            for inner in held.instances:
                if inner.id == one.id:
                    return inner
        raise KeyError(one.id)

    def _backend(self, region: str) -> Any:
        from moto.ec2.models import ec2_backends

        return ec2_backends[ACCOUNT][region]
