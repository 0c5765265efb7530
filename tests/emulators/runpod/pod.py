"""One emulated pod: its request, its history, and its bill."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from tests.emulators.runpod.catalog import single
from tests.emulators.runpod.guest import Container, Guest

ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "TERMINATED": [],
}
DISK_USD = Decimal("0.10") / 730
STOPPED_DISK_USD = Decimal("0.20") / 730


@dataclass
class Span:
    """A period that is billed at one rate, in dollars per hour; it is open while `end` is None."""

    part: str
    begin: float
    rate: Decimal
    end: float | None = None

    def amount(self, since: float, until: float) -> Decimal:
        begin, end = max(self.begin, since), min(until if self.end is None else self.end, until)
        return self.rate * Decimal(max(0.0, end - begin)) / 3600


@dataclass
class Pod:
    """A pod and its history. `rate` is dollars per hour for the whole machine, without the disk."""

    id: str
    body: dict[str, Any]
    key: str
    rate: Decimal
    data_center: str
    created: float
    status: str = "PROVISIONING"
    guest: Guest | None = None
    starting: bool = False
    started: float | None = None
    ended: float | None = None
    starts: int = 0
    spot: bool = False
    spans: list[Span] = field(default_factory=list)
    told_gpu: str | None = None
    starts_never: bool = False
    locked: bool = False

    def bill(self, now: float, **rates: Decimal) -> None:
        """End all open spans, and begin to bill these parts."""
        for span in self.spans:
            span.end = now if span.end is None else span.end
        self.spans += [Span(part, now, rate) for part, rate in rates.items()]

    def amount(self, part: str, since: float, until: float) -> Decimal:
        return sum((span.amount(since, until) for span in self.spans if span.part == part), Decimal(0))

    @property
    def micros_per_hour(self) -> int:
        """Return what the pod costs per hour now, including the disk."""
        return int(
            (sum((span.rate for span in self.spans if span.end is None), Decimal(0)) * 1_000_000).to_integral_value()
        )

    @property
    def billed(self) -> bool:
        return any(span.end is None for span in self.spans)

    def bills(self, part: str) -> bool:
        """Return whether this part (gpu, cpu or disk) is billed now."""
        return any(span.end is None and span.part == part for span in self.spans)

    @property
    def disk(self) -> int:
        return int(self.body.get("disk", 50))

    @property
    def env(self) -> dict[str, str]:
        return dict(self.body.get("env", {}))

    def container(self, gpu_memory_gb: int) -> Container:
        """Return what the pod's container runs, with the variables that RunPod adds to the environment."""
        gpu = self.body.get("gpu", {})
        gpus = gpu.get("count", 1) if gpu else 0
        added = {
            "RUNPOD_POD_ID": self.id, "RUNPOD_API_KEY": self.key, "RUNPOD_DC_ID": self.data_center,
            "RUNPOD_POD_HOSTNAME": f"{self.id}-64411eb2", "RUNPOD_GPU_COUNT": str(gpus),
        }  # fmt: skip
        if self.body.get("args"):
            command = shlex.split(self.body["args"])
        else:
            command = [*self.body.get("entrypoint", []), *self.body.get("cmd", [])] or ["/start.sh"]
        return Container(command, {**self.env, **added}, self.told_gpu or gpu.get("id", ""), gpus, gpu_memory_gb)

    def as_json(self, now: float) -> dict[str, Any]:
        up = self.status == "RUNNING" and self.guest is not None and self.guest.alive
        compute: dict[str, Any] = {}
        if "gpu" in self.body:
            gpu = self.body["gpu"]
            compute["gpu"] = {"id": self.told_gpu or gpu["id"], "count": gpu.get("count", 1)}
        else:
            compute["cpu"] = {**self.body["cpu"], "memory": 2 * self.body["cpu"]["vcpuCount"]}
        runs = self.status in ("PROVISIONING", "STARTING", "RUNNING")
        return {
            "id": self.id, "name": self.body["name"], "status": self.status, "actions": ACTIONS[self.status],
            "image": self.body["image"], "args": self.body.get("args", ""), "disk": self.disk,
            "ports": self.body.get("ports", []), "env": self.env, "registry": None, "mounts": {}, **compute,
            "cloud": self.body.get("cloud", "SECURE"), "dataCenterId": self.data_center, "cudaVersion": "12.8",
            "ssh": self._ssh(up), "template": None, "cost": single(self.rate) if runs else 0, "locked": self.locked,
            "globalNetworking": {"enabled": False}, "runtime": self._runtime(now) if up else None,
            "createdAt": stamp(self.created), "startedAt": stamp(self.started) if self.started else None,
        }  # fmt: skip

    def _ssh(self, up: bool) -> dict[str, Any]:
        user = f"{self.id}-64411eb2"
        proxy = {"host": "ssh.runpod.io", "port": 22, "username": user, "command": f"ssh {user}@ssh.runpod.io"}
        if not up or self.guest is None or "22/tcp" not in self.body.get("ports", []):
            return {"proxy": proxy, "direct": None}
        host, port = self.guest.host, self.guest.port
        return {
            "proxy": proxy,
            "direct": {"host": host, "port": port, "username": "root", "command": f"ssh root@{host} -p {port}"},
        }

    def _runtime(self, now: float) -> dict[str, Any]:
        assert self.guest is not None
        ports = [{"private": 22, "public": self.guest.port, "type": "tcp", "ip": self.guest.host}]
        return {"uptime": int(now - (self.started or now)), "ports": ports}


def stamp(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
