"""The account: its pods over time, what they cost, and which changes are allowed, without HTTP."""

from __future__ import annotations

import secrets
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from gpurun.core.clock import Clock
from tests.emulators.guests import Meter
from tests.emulators.runpod.catalog import DATA_CENTERS, usual_cpus, usual_gpus
from tests.emulators.runpod.guest import Boot
from tests.emulators.runpod.pod import ACTIONS, DISK_USD, STOPPED_DISK_USD, Pod, stamp
from tests.emulators.runpod.problems import SOLD_OUT, Problem


class World:
    """Pods that really exist, by a clock; a list or a read may show an older state.

    Call all methods under `lock`, except `tick` and `close`, which take it; containers boot without it.
    """

    def __init__(self, clock: Clock, boot: Boot) -> None:
        self.clock, self.boot = clock, boot
        self.lock = threading.RLock()
        self.pods: dict[str, Pod] = {}
        self.gpus, self.cpus = usual_gpus(), usual_cpus()
        self.customer = f"user_{secrets.token_hex(8)}"
        self.balance = Decimal("100")
        self.provision_s, self.start_s = 0.0, 0.0
        self.terminated_s = 1.0  # How long a read shows a dead pod as TERMINATED before it answers 404.
        self.list_lag_s = self.delete_lag_s = self.read_lag_s = 0.0
        self.never_boots = False
        self.has_old_drivers = False  # Whether a pod without a minimum CUDA version never starts.
        self.deaf_deletes = 0  # How many terminations are answered as done but have no effect.
        self.price_factor = Decimal(1)
        self.told_gpu: str | None = None
        self.bill_lag_s = 0.0
        self.meter = Meter(clock.wall)

    @property
    def alive(self) -> list[Pod]:
        """Return the pods that are billed, whatever an answer shows: the truth for a test."""
        return [pod for pod in self.pods.values() if pod.billed]

    def create(self, body: dict[str, Any], *, bid: Decimal | None = None) -> Pod:
        price = self._price(body, bid)
        if self.balance < price:
            raise Problem(402, "insufficient balance: you need credit for at least one hour")
        centers = body.get("dataCenterIds") or list(DATA_CENTERS)
        kind = self.gpus.get(body.get("gpu", {}).get("id", ""))
        if not set(centers) & (kind.centers if kind else set(DATA_CENTERS)):
            raise Problem(400, SOLD_OUT)
        now = self.clock.wall()
        identifier = secrets.token_hex(7)
        pod = Pod(
            id=identifier,
            body=body,
            key=f"rpa_pod_{secrets.token_hex(12)}",
            rate=price * self.price_factor,
            data_center=next(center for center in centers if center in DATA_CENTERS),
            created=now,
            spot=bid is not None,
            told_gpu=self.told_gpu,
            starts_never=self.has_old_drivers and "minCudaVersion" not in body.get("gpu", {}),
        )
        pod.bill(now, **{self._part(pod): pod.rate, "disk": DISK_USD * pod.disk})
        self.pods[identifier] = pod
        self.meter.start(identifier, pod.micros_per_hour)
        return pod

    def listed(self) -> list[Pod]:
        now = self.clock.wall()
        return [pod for pod in self.pods.values() if self._is_listed(pod, now)]

    def read(self, identifier: str) -> Pod:
        pod, now = self.pods.get(identifier), self.clock.wall()
        if pod is None or now - pod.created < self.read_lag_s or not self._is_readable(pod, now):
            raise Problem(404, "pod not found")
        return pod

    def act(self, identifier: str, action: str) -> Pod:
        pod = self.read(identifier)
        if action not in ACTIONS[pod.status]:
            raise Problem(409, f"action {action} is not allowed in status {pod.status}")
        self._refuse_if_locked(pod)
        now = self.clock.wall()
        if action == "terminate":
            self._end(pod, now)
        elif action == "stop":
            self._kill_guest(pod)
            pod.status = "EXITED"
            pod.bill(now, disk=STOPPED_DISK_USD * pod.disk)
            self.meter.set_rate(pod.id, pod.micros_per_hour)
        elif action == "start":
            pod.status = "STARTING"
            pod.bill(now, **{self._part(pod): pod.rate, "disk": DISK_USD * pod.disk})
            self.meter.set_rate(pod.id, pod.micros_per_hour)
        else:
            self._kill_guest(pod)
        return pod

    def delete(self, identifier: str) -> None:
        self._refuse_if_locked(self.read(identifier))
        self._end(self.read(identifier), self.clock.wall())

    def _refuse_if_locked(self, pod: Pod) -> None:
        if pod.locked:
            raise Problem(409, "pod is locked")

    def tick(self) -> None:
        """Bring every pod up to the present time, and boot the containers that are due."""
        with self.lock:
            now = self.clock.wall()
            due = []
            for pod in self.pods.values():
                if pod.status == "PROVISIONING" and now - pod.created >= self.provision_s:
                    pod.status = "STARTING"
                down = pod.guest is None or not pod.guest.alive
                ready = pod.status == "RUNNING" or (
                    pod.status == "STARTING" and now - pod.created >= self.provision_s + self.start_s
                )
                if ready and down and not (pod.starting or pod.starts_never or self.never_boots):
                    pod.starting = True
                    due.append(pod)
        for pod in due:
            self._boot(pod)

    def billing(self, wanted: str | None, since: float, until: float) -> list[dict[str, Any]]:
        """Return hourly records of what is billed already; `wanted` is a pod's id, or None for all pods."""
        now = self.clock.wall() - self.bill_lag_s
        records = []
        hour = datetime.fromtimestamp(since, UTC).replace(minute=0, second=0, microsecond=0)
        while hour.timestamp() < until:
            begin, end = hour.timestamp(), (hour + timedelta(hours=1)).timestamp()
            for pod in self.pods.values():
                parts = {f"{part}Amount": pod.amount(part, begin, min(end, now)) for part in ("gpu", "cpu", "disk")}
                if wanted in (None, pod.id) and any(parts.values()):
                    amounts = {name: float(amount) for name, amount in parts.items()}
                    whole = {"podId": pod.id, "totalAmount": float(sum(parts.values())), **amounts}
                    records.append({"startTime": stamp(begin), "endTime": stamp(end), **whole})
            hour += timedelta(hours=1)
        return records

    def close(self) -> None:
        """End every pod."""
        with self.lock:
            for pod in self.pods.values():
                if pod.status != "TERMINATED":
                    self.deaf_deletes = 0
                    self._end(pod, self.clock.wall())

    def _boot(self, pod: Pod) -> None:
        """Start a container; kill it if its pod has ended meanwhile."""
        try:
            kind = self.gpus.get(pod.body.get("gpu", {}).get("id", ""))
            guest = self.boot(pod.container(kind.memory if kind else 0))
        except Exception:
            with self.lock:
                pod.starting, pod.status = False, "ERROR"
            raise
        with self.lock:
            pod.starting = False
            if pod.status not in ("STARTING", "RUNNING"):
                guest.kill()
                return
            pod.guest, pod.status, pod.started = guest, "RUNNING", self.clock.wall()
            pod.starts += 1

    def _end(self, pod: Pod, now: float) -> None:
        if self.deaf_deletes > 0:
            self.deaf_deletes -= 1
            return
        if pod.status == "TERMINATED":
            return
        self._kill_guest(pod)
        pod.status, pod.ended = "TERMINATED", now
        pod.bill(now)
        self.meter.stop(pod.id)

    def _kill_guest(self, pod: Pod) -> None:
        guest, pod.guest = pod.guest, None
        if guest is not None:
            guest.kill()

    def _is_readable(self, pod: Pod, now: float) -> bool:
        return pod.ended is None or now - pod.ended < max(self.terminated_s, self.delete_lag_s)

    def _is_listed(self, pod: Pod, now: float) -> bool:
        if pod.ended is not None:
            return now - pod.ended < self.delete_lag_s
        return now - pod.created >= self.list_lag_s

    def _price(self, body: dict[str, Any], bid: Decimal | None) -> Decimal:
        """Return a pod's price in dollars per hour; raise a Problem if it cannot be rented."""
        cloud = body.get("cloud", "SECURE").lower()
        if "cpu" in body:
            flavour = self.cpus.get(body["cpu"]["id"])
            if flavour is None or cloud != "secure":
                raise Problem(400, "unknown CPU flavour for this cloud")
            if flavour.stock == "NONE" or body["cpu"]["vcpuCount"] > flavour.most:
                raise Problem(400, SOLD_OUT)
            return flavour.price * body["cpu"]["vcpuCount"]
        kind, count = self.gpus.get(body["gpu"]["id"]), body["gpu"].get("count", 1)
        if kind is None:
            raise Problem(400, f"unknown GPU type {body['gpu']['id']}")
        if kind.level(cloud, count) == "NONE":
            raise Problem(400, SOLD_OUT)
        if bid is not None and bid < kind.bid[cloud]:
            raise Problem(400, "Your bid is below the minimum bid.")
        return (kind.price[cloud] if bid is None else bid) * count

    def _part(self, pod: Pod) -> str:
        return "gpu" if "gpu" in pod.body else "cpu"
