"""The emulated account behind the HTTP server: every route, the keys, and the switches that a test sets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gpurun.core.clock import Clock, SystemClock
from tests.emulators.runpod import contract, graphql
from tests.emulators.runpod.catalog import data_centers
from tests.emulators.runpod.guest import Boot, FakeGuest
from tests.emulators.runpod.pod import stamp
from tests.emulators.runpod.problems import Problem
from tests.emulators.runpod.server import Door
from tests.emulators.runpod.world import World
from tests.emulators.serving import HttpEmulator

FULL_KEY = "rpa_test_full_0123456789"
READ_KEY = "rpa_test_read_0123456789"
_WRITES = {"create", "update", "delete", "action"}


class RunPodEmulator(HttpEmulator):
    """An emulated RunPod account.

    `refused_fields` are fields of a create that this version of the service does not know.
    """

    handler = Door

    def __init__(self, *, clock: Clock | None = None, boot: Boot = FakeGuest, tick_s: float | None = 0.05) -> None:
        super().__init__(tick_s)
        self.world = World(clock or SystemClock(), boot)
        self.refused_fields: frozenset[str] = frozenset()
        self.page_size: int | None = None
        self.retry_after = "1"
        self.revoked = False  # Whether the account's own key is revoked; the keys of its pods are not.
        self.denied: set[str] = set()

    @property
    def base_url(self) -> str:
        return self.origin

    @property
    def environment(self) -> dict[str, str]:
        return {"RUNPOD_API_BASE_URL": self.base_url, "RUNPOD_API_KEY": FULL_KEY}

    def tick(self) -> None:
        self.world.tick()  # It takes the lock itself, and boots containers without the lock.

    def answer(self, route: str, identifier: str, query: dict[str, str], body: Any, own: str | None) -> tuple[int, Any]:
        """Return the status and the body that answer a request."""
        with self.world.lock:
            match route:
                case "create":
                    return 201, self._checked("Pod", self._create(body))
                case "list":
                    return 200, self._page(query)
                case "read":
                    return 200, self._checked("Pod", self._pod_json(identifier))
                case "update":
                    return 200, self._checked("Pod", self._update(identifier, body))
                case "delete":
                    self.world.delete(identifier)
                    return 204, None
                case "action":
                    return self._act(identifier, body)
                case "gpus" | "cpus":
                    return 200, self._catalog(route, query)
                case "datacenters":
                    return 200, self._checked("ListDataCentersResponse", {"dataCenters": data_centers()})
                case "billing":
                    return 200, self._checked("ListPodBillingResponse", self._bill(query))
            return 200, self._graphql(body, own)

    def _create(self, body: Any) -> Any:
        errors = contract.body_errors(body, self.refused_fields)
        if errors:
            raise Problem(422, "Request validation failed.", errors)
        if ("gpu" in body) == ("cpu" in body):
            raise Problem(400, "exactly one of gpu or cpu must be set")
        if not body.get("image") and not body.get("templateId"):
            raise Problem(422, "Request validation failed.", ["$: image is required unless templateId is set"])
        if len(body.get("env", {})) > 50:
            raise Problem(400, "at most 50 environment variables")
        return self.world.create(body).as_json(self.world.clock.wall())

    def _pod_json(self, identifier: str) -> Any:
        return self.world.read(identifier).as_json(self.world.clock.wall())

    def _update(self, identifier: str, body: Any) -> Any:
        errors = contract.against("UpdatePodRequest", body)
        if errors or set(body) != {"locked"}:
            raise Problem(422, "Request validation failed.", errors or ["$: only `locked` is known here"])
        self.world.read(identifier).locked = body["locked"]
        return self._pod_json(identifier)

    def _page(self, query: dict[str, str]) -> Any:
        now = self.world.clock.wall()
        pods = [pod.as_json(now) for pod in self.world.listed()]
        self._checked("ListPodsResponse", {"pods": pods})
        if self.page_size is None:
            return {"pods": pods}
        begin = int(query.get("cursor", "0"))
        end = begin + self.page_size
        return {"pods": pods[begin:end], "nextCursor": str(end) if end < len(pods) else None}

    def _act(self, identifier: str, body: Any) -> tuple[int, Any]:
        if contract.against("PodActionRequest", body) or not isinstance(body, dict) or "action" not in body:
            raise Problem(422, "Request validation failed.", ["$.action: not an action"])
        pod = self.world.act(identifier, body["action"])
        if body["action"] == "terminate":
            return 204, None
        return 200, self._checked("Pod", pod.as_json(self.world.clock.wall()))

    def _catalog(self, route: str, query: dict[str, str]) -> Any:
        asks = query.get("include") == "AVAILABILITY"
        if asks != ("product" in query):
            raise Problem(400, "include=AVAILABILITY and product go together")
        if route == "cpus":
            cpus = [kind.as_json(with_stock=asks) for kind in self.world.cpus.values()]
            return self._checked("ListCpuTypesResponse", {"cpus": cpus})
        cloud, count = query.get("cloud", "SECURE").lower(), int(query.get("count", "1"))
        gpus = [kind.as_json(cloud, count, with_stock=asks) for kind in self.world.gpus.values()]
        return self._checked("ListGpuTypesResponse", {"gpus": gpus})

    def _bill(self, query: dict[str, str]) -> Any:
        now = self.world.clock.wall()
        since = _wall(query["startTime"]) if "startTime" in query else now - 30 * 86_400
        until = _wall(query["endTime"]) if "endTime" in query else now
        records = self.world.billing(query.get("podId"), since, until)
        names = ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount")
        filters = {"startTime": stamp(since), "endTime": stamp(until), "bucketSize": query.get("bucketSize", "day")}
        totals = {name: sum(record[name] for record in records) for name in names}
        pods = len({record["podId"] for record in records})
        metadata = {"query": filters, "recordCount": len(records), "uniquePodCount": pods, "totals": totals}
        return {"records": records, "metadata": metadata}

    def _graphql(self, body: Any, own: str | None) -> Any:
        try:
            return {"data": graphql.execute(str(body.get("query", "")), self.world, own)}
        except graphql.QueryError as error:
            return {"errors": [{"message": str(error), "extensions": {"code": "BAD_USER_INPUT"}}]}

    def _checked(self, schema: str, value: Any) -> Any:
        """Return an answer; record where it breaks the document, which is a fault of this emulator."""
        self.violations += [f"answer {schema}: {error}" for error in contract.against(schema, value)]
        return value

    def check_key(self, route: str, identifier: str, key: str) -> str | None:
        """Return None for a key of the account, or the id of the one pod that a pod's key may end.

        Raise a Problem if the key is wrong or does not permit the route.
        """
        if key == FULL_KEY and self.revoked:
            raise Problem(401, "invalid bearer token")
        if key == FULL_KEY and route in self.denied:
            raise Problem(403, "access denied")
        if key == FULL_KEY or (key == READ_KEY and route not in _WRITES):
            return None
        if key == READ_KEY:
            raise Problem(403, "access denied")
        own = next((pod.id for pod in self.world.pods.values() if pod.key == key and pod.status != "TERMINATED"), None)
        if own is None:
            raise Problem(401, "missing bearer token" if not key else "invalid bearer token")
        if route != "graphql" and not (route in ("delete", "action") and identifier == own):
            raise Problem(403, "access denied")
        return own


def _wall(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
