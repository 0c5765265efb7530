"""The account: its instances over time, its keys, and its bill, without HTTP."""

from __future__ import annotations

import re
import secrets
import threading
from fractions import Fraction
from typing import Any

from gpurun.core.clock import Clock
from tests.emulators.guests import Meter
from tests.emulators.lambda_cloud.catalog import REGIONS, usual_kinds
from tests.emulators.lambda_cloud.guest import Boot
from tests.emulators.lambda_cloud.instance import Instance
from tests.emulators.lambda_cloud.problems import Problem, no_instance, sold_out, wrong

MICROS_PER_CENT = 10_000
_TAG_KEY = re.compile(r"[a-z][a-z0-9-:]+")
_MINUTE_S = 60


class World:
    """Instances that really exist, by a clock; a list or a read may show an older state.

    Call all methods under `lock`. `meter` is Lambda's bill: whole minutes, from the first `active` until it is
    terminated. `widest` counts from the launch, for a test that does not trust the bill to begin so late.
    """

    def __init__(self, clock: Clock, boot: Boot) -> None:
        self.clock, self.boot = clock, boot
        self.lock = threading.RLock()
        self.instances: dict[str, Instance] = {}
        self.keys: dict[str, dict[str, str]] = {}
        self.kinds = usual_kinds()
        self.boot_s = 0.0
        self.never_boots = False
        self.terminating_s, self.terminated_s = 0.0, 1.0
        self.list_lag_s = self.read_lag_s = 0.0
        self.deaf_terminates = 0  # How many terminations are answered as done but have no effect.
        self.capacity_left: int | None = None  # How many launches succeed, whatever the list of types shows.
        self.price_factor = Fraction(1)
        self.given_kind: str | None = None  # The type that is launched in place of the requested one.
        self.keeps_tags = True
        self.keys_in_use_stay = False
        self.takes_a_key_twice = True
        self._moment: float | None = None  # The moment of the change that is being billed; None is now.
        self.meter, self.widest = Meter(self._wall), Meter(self._wall)

    @property
    def alive(self) -> list[Instance]:
        """Return the instances that have not ended, whatever an answer shows: the truth for a test."""
        return [instance for instance in self.instances.values() if instance.status not in ("terminated", "gone")]

    def add_key(self, name: str, public_key: str) -> dict[str, str]:
        if any(key["name"] == name for key in self.keys.values()):
            raise Problem(409, "global/duplicate", "A key of this name exists.")
        known = {tuple(key["public_key"].split()[:2]) for key in self.keys.values()}
        if not self.takes_a_key_twice and tuple(public_key.split()[:2]) in known:
            raise Problem(409, "global/duplicate", "This key exists.")
        key = {"id": secrets.token_hex(16), "name": name, "public_key": public_key}
        self.keys[key["id"]] = key
        return key

    def remove_key(self, identifier: str) -> None:
        key = self.keys.get(identifier)
        if key is None:
            raise Problem(404, "global/not-found")
        if self.keys_in_use_stay and any(key["name"] in instance.body["ssh_key_names"] for instance in self.alive):
            raise Problem(409, "ssh-keys/key-in-use", "The key is in use.")
        del self.keys[identifier]

    def launch(self, body: dict[str, Any]) -> Instance:
        key = self._key_of(body)
        kind = self.kinds.get(body["instance_type_name"])
        if kind is None or body["region_name"] not in REGIONS:
            raise Problem(404, "global/object-does-not-exist", "Instance type or region was not found.")
        for tag in body.get("tags", []):
            if not _TAG_KEY.fullmatch(tag["key"]) or len(tag["key"]) > 55 or len(tag["value"]) > 128:
                raise wrong(f"The tag {tag['key']} is not allowed.")
        if len(body.get("user_data", "").encode()) > 1_000_000:
            raise wrong("User data cannot exceed 1MB.")
        if body["region_name"] not in kind.regions or self.capacity_left == 0:
            raise sold_out()
        if self.capacity_left is not None:
            self.capacity_left -= 1
        return self._make(body, key["public_key"])

    def _key_of(self, body: dict[str, Any]) -> dict[str, str]:
        names = body.get("ssh_key_names", [])
        if len(names) != 1:
            raise wrong("Exactly one SSH key must be specified.")
        found = next((key for key in self.keys.values() if key["name"] == names[0]), None)
        if found is None:
            raise Problem(404, "global/object-does-not-exist", "SSH key was not found.")
        return found

    def _make(self, body: dict[str, Any], public_key: str) -> Instance:
        kind, now = self.kinds[self.given_kind or body["instance_type_name"]], self.clock.wall()
        made = Instance(
            id=secrets.token_hex(16),
            body=body,
            kind=kind,
            cents=int(kind.cents * self.price_factor),
            public_key=public_key,
            launched=now,
            tags=body.get("tags", []) if self.keeps_tags else [],
        )
        made.become("booting", now)
        self.instances[made.id] = made
        self.widest.start(made.id, made.cents * MICROS_PER_CENT, _MINUTE_S)
        return made

    def listed(self, age_s: float = 0.0) -> list[tuple[Instance, str]]:
        """Return every instance in a list that is `age_s` or `list_lag_s` old, with its status."""
        then = self.clock.wall() - max(self.list_lag_s, age_s)
        seen = [(instance, instance.status_at(then)) for instance in self.instances.values()]
        return [(instance, status) for instance, status in seen if status != "gone"]

    def read(self, identifier: str, age_s: float = 0.0) -> tuple[Instance, str]:
        instance = self.instances.get(identifier)
        status = instance.status_at(self.clock.wall() - max(self.read_lag_s, age_s)) if instance else "gone"
        if instance is None or status == "gone":
            raise no_instance()
        return instance, status

    def terminate(self, identifiers: list[str]) -> list[Instance]:
        """Terminate all of these instances; raise a Problem and terminate none if one does not exist."""
        found = [self.instances.get(identifier) for identifier in identifiers]
        there = [instance for instance in found if instance is not None and instance.status != "gone"]
        if len(there) < len(identifiers):
            raise no_instance()
        for instance in there:
            if self.deaf_terminates > 0:
                self.deaf_terminates -= 1
            elif instance.status not in ("terminating", "terminated"):
                self._end(instance)
        return there

    def ail(self, instance: Instance, status: str = "unhealthy") -> None:
        """Show an instance as unhealthy, or in another status, from now on; its billing continues."""
        instance.become(status, self.clock.wall())

    def tick(self) -> None:
        """Bring every instance up to the present time."""
        now = self.clock.wall()
        for instance in self.instances.values():
            if instance.status == "booting" and not self.never_boots and now >= instance.launched + self.boot_s:
                self._activate(instance, instance.launched + self.boot_s)
            if instance.powered_off and instance.status == "active":
                self.ail(instance)  # Lambda only shows an alert, and continues to bill.
            if instance.status == "terminating" and now >= instance.since + self.terminating_s:
                self._pass_on(instance, "terminated", instance.since + self.terminating_s)
            if instance.status == "terminated" and now >= instance.since + self.terminated_s:
                instance.become("gone", instance.since + self.terminated_s)

    def close(self) -> None:
        """Kill every guest."""
        for instance in self.alive:
            self._kill(instance)

    def _activate(self, instance: Instance, wall: float) -> None:
        instance.guest = self.boot(instance.machine())
        instance.host = instance.guest.host
        instance.become("active", wall)
        self._moment = wall
        self.meter.start(instance.id, instance.cents * MICROS_PER_CENT, _MINUTE_S)
        self._moment = None

    def _pass_on(self, instance: Instance, status: str, wall: float) -> None:
        instance.become(status, wall)
        self._moment = wall
        self.meter.stop(instance.id)
        self.widest.stop(instance.id)
        self._moment = None

    def _end(self, instance: Instance) -> None:
        self._kill(instance)
        instance.become("terminating", self.clock.wall())

    def _kill(self, instance: Instance) -> None:
        guest, instance.guest = instance.guest, None
        if guest is not None:
            guest.kill()

    def _wall(self) -> float:
        return self.clock.wall() if self._moment is None else self._moment
