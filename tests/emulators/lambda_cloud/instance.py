"""One emulated instance: its request, and its status at every moment of its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.emulators.lambda_cloud.catalog import Kind, region_json
from tests.emulators.lambda_cloud.guest import Guest, Machine

_UP = ("active", "unhealthy")
_OPTIONAL = ("name", "ip", "private_ip", "hostname", "jupyter_token", "jupyter_url")


@dataclass
class Instance:
    """An instance and its history. Its parts and its price are fixed at the launch."""

    id: str
    body: dict[str, Any]
    kind: Kind
    cents: int
    public_key: str
    launched: float
    history: list[tuple[float, str]] = field(default_factory=list)
    guest: Guest | None = None
    host: str = ""
    tags: list[dict[str, str]] = field(default_factory=list)
    powered_off: bool = False

    @property
    def status(self) -> str:
        """Return the present status; `gone` after the instance has left the list."""
        return self.history[-1][1]

    @property
    def since(self) -> float:
        return self.history[-1][0]

    def status_at(self, wall: float) -> str:
        """Return the status at a moment; also `gone` before the launch."""
        return next((status for begun, status in reversed(self.history) if begun <= wall), "gone")

    def become(self, status: str, wall: float) -> None:
        self.history.append((wall, status))

    def machine(self) -> Machine:
        def power_off() -> None:
            self.powered_off = True  # Only noted here, because any thread may call this.

        return Machine(
            id=self.id,
            hostname=self.body.get("hostname", self.id),
            authorized_key=self.public_key,
            user_data=self.body.get("user_data", ""),
            card=self.kind.card,
            gpus=self.kind.gpus,
            memory_mib=self.kind.memory_mib,
            on_poweroff=power_off,
        )

    def as_json(self, status: str, *, nulls: bool) -> dict[str, Any]:
        """Return the instance as an answer shows it in this status.

        Values that are not known yet are missing, or null with `nulls`.
        """
        fields: dict[str, Any] = {
            "id": self.id,
            "status": status,
            "ssh_key_names": self.body["ssh_key_names"],
            "file_system_names": [],
            "region": region_json(self.body["region_name"]),
            "instance_type": {**self.kind.as_json(), "price_cents_per_hour": self.cents},
            "actions": _actions(status),
            "tags": self.tags,
            "firewall_rulesets": [],
        }
        if "name" in self.body:
            fields["name"] = self.body["name"]
        if self.host and status in _UP:
            token = f"jupyter{self.id}"
            fields |= {"ip": self.host, "private_ip": "10.0.2.100", "hostname": self.body.get("hostname", self.host)}
            fields |= {
                "jupyter_token": token,
                "jupyter_url": f"https://jupyter-{self.id}.lambdaspaces.com/?token={token}",
            }
        return {**(dict.fromkeys(_OPTIONAL) if nulls else {}), **fields}


def _actions(status: str) -> dict[str, Any]:
    code = {"booting": "vm-has-not-launched", "terminating": "vm-is-terminating", "terminated": "vm-is-terminating"}
    free: dict[str, Any] = {"available": True}
    blocked = {"available": False, "reason_code": code.get(status, ""), "reason_description": f"It is {status}."}
    names = ("migrate", "rebuild", "restart", "cold_reboot")
    terminate = blocked if code.get(status) == "vm-is-terminating" else free
    return {**dict.fromkeys(names, blocked if status in code else free), "terminate": terminate}
