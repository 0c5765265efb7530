"""The account: its instances in time, its keys, and what is billed. No HTTP here."""

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
    """Instances that are really there, by a clock; what a list or a read tells of them may be old.

    All methods are called under `lock`. `meter` is Lambda's bill: whole minutes, from the first `active` until it is
    terminated. `widest` counts from the launch on, for a judge that does not trust the bill to begin so late.
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
        self.deaf_terminates = 0  # So many requests for an end are answered as if obeyed, and are not.
        self.capacity_left: int | None = None  # So many launches succeed, whatever the list of types says.
        self.price_factor = Fraction(1)
        self.given_kind: str | None = None  # What is made instead of what was asked for.
        self.keeps_tags = True
        self.keys_in_use_stay = False
        self.takes_a_key_twice = True
        self._moment: float | None = None  # The moment that is being accounted for, when it is not now.
        self.meter, self.widest = Meter(self._wall), Meter(self._wall)

    @property
    def alive(self) -> list[Instance]:
        """What has not ended, whatever is told of it: the oracle of a test."""
        return [one for one in self.instances.values() if one.status not in ("terminated", "gone")]

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
        if self.keys_in_use_stay and any(key["name"] in one.body["ssh_key_names"] for one in self.alive):
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
        """Every instance that is told of, with its status, as it all was some time ago."""
        then = self.clock.wall() - max(self.list_lag_s, age_s)
        seen = [(one, one.status_at(then)) for one in self.instances.values()]
        return [(one, status) for one, status in seen if status != "gone"]

    def read(self, identifier: str, age_s: float = 0.0) -> tuple[Instance, str]:
        one = self.instances.get(identifier)
        status = one.status_at(self.clock.wall() - max(self.read_lag_s, age_s)) if one else "gone"
        if one is None or status == "gone":
            raise no_instance()
        return one, status

    def terminate(self, identifiers: list[str]) -> list[Instance]:
        """All of them or, where one is not there, none."""
        found = [self.instances.get(one) for one in identifiers]
        there = [one for one in found if one is not None and one.status != "gone"]
        if len(there) < len(identifiers):
            raise no_instance()
        for one in there:
            if self.deaf_terminates > 0:
                self.deaf_terminates -= 1
            elif one.status not in ("terminating", "terminated"):
                self._end(one)
        return there

    def ail(self, instance: Instance, status: str = "unhealthy") -> None:
        """From now on it is told as unhealthy, or as something else; it is billed on."""
        instance.become(status, self.clock.wall())

    def tick(self) -> None:
        """Bring every instance to where it is by now."""
        now = self.clock.wall()
        for one in self.instances.values():
            if one.status == "booting" and not self.never_boots and now >= one.launched + self.boot_s:
                self._activate(one, one.launched + self.boot_s)
            if one.powered_off and one.status == "active":
                self.ail(one)  # An alert, and no end: it is billed on.
            if one.status == "terminating" and now >= one.since + self.terminating_s:
                self._pass_on(one, "terminated", one.since + self.terminating_s)
            if one.status == "terminated" and now >= one.since + self.terminated_s:
                one.become("gone", one.since + self.terminated_s)

    def close(self) -> None:
        """Switch everything off."""
        for one in self.alive:
            self._kill(one)

    def _activate(self, one: Instance, wall: float) -> None:
        one.guest = self.boot(one.machine())
        one.host = one.guest.host
        one.become("active", wall)
        self._moment = wall
        self.meter.start(one.id, one.cents * MICROS_PER_CENT, _MINUTE_S)
        self._moment = None

    def _pass_on(self, one: Instance, status: str, wall: float) -> None:
        one.become(status, wall)
        self._moment = wall
        self.meter.stop(one.id)
        self.widest.stop(one.id)
        self._moment = None

    def _end(self, one: Instance) -> None:
        self._kill(one)
        one.become("terminating", self.clock.wall())

    def _kill(self, one: Instance) -> None:
        guest, one.guest = one.guest, None
        if guest is not None:
            guest.kill()

    def _wall(self) -> float:
        return self.clock.wall() if self._moment is None else self._moment
