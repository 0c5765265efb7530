"""The instances over time: their states, what each costs, and the schedules that end them.

moto holds what a caller sees of an instance; this module decides, by one clock, when that changes.
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
    """One instance. `shutdown` is what its own power-off does: "stop" or "terminate"."""

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
    """Return the id of the request that created a spot instance."""
    return f"sir-{identifier[2:10]}"


class World:
    """All instances of the account. Call every method under `lock`; only a guest's own power-off needs no lock."""

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
        """Return the spot instances by the id of their spot request."""
        return {spot_request(instance.id): instance for instance in self.instances.values() if instance.spot_usd}

    @property
    def alive(self) -> list[Launched]:
        """Return all instances that are not terminated, whatever an answer shows: the truth for a test."""
        return [instance for instance in self.instances.values() if instance.state != "terminated"]

    def add(self, instance: Launched, rate_micros: int) -> None:
        """Show an instance that moto has just created as pending, and begin to bill it."""
        self.instances[instance.id] = instance
        inner = self._inner(instance)
        inner.launch_time = datetime.fromtimestamp(self.clock.wall(), UTC)
        self._say(instance, "pending")
        for card in inner.nics.values():
            card.public_ip = None
        self.meter.start(instance.id, rate_micros, 1, LEAST_BILLED_S)

    def hidden(self, instance: Launched) -> bool:
        """Return whether the instance is so new that no answer shows it yet."""
        return self.clock.wall() - instance.launched < self.hidden_s

    def end(self, identifier: str, code: str = BY_USER) -> None:
        """Begin to terminate an instance, unless it is already ending or ended."""
        instance = self.instances[identifier]
        if instance.state in ("shutting-down", "terminated"):
            return
        instance.ending = self.clock.wall()
        self._say(instance, "shutting-down", code)
        if instance.guest is not None:
            instance.guest.kill()
        self.tick()

    def interrupt(self, identifier: str) -> None:
        """End a spot instance at once, without notice, with AWS's state reason for an interruption."""
        self.end(identifier, "Server.SpotInstanceTermination")

    def tick(self) -> None:
        """Carry out everything that is due by now."""
        now = self.clock.wall()
        self._fire(now)
        for instance in list(self.instances.values()):
            if isinstance(instance.guest, FakeGuest):
                instance.guest.tick(now)
        while self._powered_off:
            self._obey_poweroff(self._powered_off.pop())
        for instance in list(self.instances.values()):
            if instance.state == "pending" and not self.never_boots and now - instance.launched >= self.pending_s:
                self._start(instance)
            if instance.state == "shutting-down" and now - (instance.ending or now) >= self.dying_s:
                self._finish(instance)
            if instance.ended is not None and now - instance.ended >= self.tomb_s:
                self._forget(instance)

    def close(self) -> None:
        """Kill every guest."""
        for instance in self.instances.values():
            if instance.guest is not None:
                instance.guest.kill()

    def _start(self, instance: Launched) -> None:
        instance.guest = self.boot(
            Machine(instance.id, instance.type_id, instance.gpu_count, instance.user_data, self._hears(instance.id))
        )
        self._say(instance, "running")
        for card in self._inner(instance).nics.values():
            card.public_ip = instance.guest.host

    def _hears(self, identifier: str) -> Callable[[], None]:
        """Return the callback for a guest's own power-off, which it notes; the next tick carries it out."""
        return lambda: self._powered_off.append(identifier)

    def _obey_poweroff(self, identifier: str) -> None:
        instance = self.instances.get(identifier)
        if instance is None or instance.state != "running":
            return
        if instance.shutdown == "terminate":
            instance.ending = self.clock.wall()
            self._say(instance, "shutting-down", "Client.InstanceInitiatedShutdown")
        else:
            self._say(instance, "stopped", "Client.InstanceInitiatedShutdown")
            self.meter.stop(instance.id)

    def _finish(self, instance: Launched) -> None:
        code = self._inner(instance).state_reason.code
        self._inner(instance).terminate()
        instance.ended = self.clock.wall()
        self.meter.stop(instance.id)
        self._say(instance, "terminated", code)

    def _forget(self, instance: Launched) -> None:
        """Remove an instance from moto, so that no answer shows it any more."""
        reservations = self._backend(instance.region).reservations
        for name, held in list(reservations.items()):
            if any(inner.id == instance.id for inner in held.instances):
                del reservations[name]

    def _say(self, instance: Launched, state: str, code: str = "") -> None:
        from moto.ec2.models.instances import InstanceState, StateReason

        instance.state = state
        inner = self._inner(instance)
        inner._state = InstanceState(state, _CODES[state])
        stamp = datetime.fromtimestamp(self.clock.wall(), UTC).strftime("%Y-%m-%d %H:%M:%S GMT")
        words = "User initiated" if code.startswith("Client.") else code
        inner._reason = f"{words} ({stamp})" if code else ""
        inner.state_reason = StateReason(f"{code}: {code.partition('.')[2]}" if code else "", code)

    def _fire(self, now: float) -> None:
        """Let each schedule that is due end its instances; delete it if it was created to delete itself."""
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

    def _inner(self, instance: Launched) -> Any:
        """Return moto's record of an instance."""
        for held in self._backend(instance.region).reservations.values():
            for inner in held.instances:
                if inner.id == instance.id:
                    return inner
        raise KeyError(instance.id)

    def _backend(self, region: str) -> Any:
        from moto.ec2.models import ec2_backends

        return ec2_backends[ACCOUNT][region]
