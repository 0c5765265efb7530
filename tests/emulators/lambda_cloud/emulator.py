"""The application behind the wire: every route, and the switches that a test turns."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from gpurun.core.clock import Clock, SystemClock
from tests.emulators.lambda_cloud import contract
from tests.emulators.lambda_cloud.catalog import REGIONS, region_json
from tests.emulators.lambda_cloud.guest import Boot, FakeGuest
from tests.emulators.lambda_cloud.instance import Instance
from tests.emulators.lambda_cloud.limits import Limits
from tests.emulators.lambda_cloud.problems import wrong
from tests.emulators.lambda_cloud.server import BASE, Server, Trouble
from tests.emulators.lambda_cloud.world import World

KEY = "secret_gpurun-test_0123456789abcdef0123456789abcdef.0123456789abcdef"


class LambdaEmulator:
    """One account on one loopback address, until `stop`. `world` is the truth, `requests` what was asked.

    `violations` are requests and answers that the OpenAPI document does not allow. `nulls` tells what is not known yet
    as null, which the document does not allow either and the real service does. With `tick_s` of None time passes only
    when somebody asks.
    """

    def __init__(self, *, clock: Clock | None = None, boot: Boot = FakeGuest, tick_s: float | None = 0.05) -> None:
        self.world = World(clock or SystemClock(), boot)
        self.limits = Limits(self.world.clock)
        self.api_keys = {KEY}
        self.requests: list[tuple[str, str, Any]] = []
        self.violations: list[str] = []
        self.retry_after = ""
        self.nulls = False
        self.ended = threading.Event()
        self._faults: dict[str, list[Trouble | None]] = defaultdict(list)
        self._tick_s = tick_s
        self._server = Server(self)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        ]
        if tick_s is not None:
            self._threads.append(threading.Thread(target=self._tick, daemon=True))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{BASE}"

    def start(self) -> LambdaEmulator:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        with self.world.lock:
            self.world.close()

    def __enter__(self) -> LambdaEmulator:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def fail(self, route: str, *faults: Trouble | None) -> None:
        """The next requests of a route go wrong in these ways, one each; None lets one pass."""
        self._faults[route] += faults

    def next_fault(self, route: str) -> Trouble | None:
        return self._faults[route].pop(0) if self._faults[route] else None

    def count(self, route: str) -> int:
        return sum(1 for _, name, _ in self.requests if name == route)

    def bodies(self, route: str) -> list[Any]:
        return [body for _, name, body in self.requests if name == route]

    def check_request(self, method: str, path: str, query: set[str], body: Any) -> None:
        """Refuse what the document does not allow, and keep it as a violation."""
        errors = contract.request_errors(method, path, query, body)
        self.violations += [f"request {error}" for error in errors]
        if errors:
            raise wrong("; ".join(errors))

    def check_answer(self, method: str, path: str, status: int, told: Any) -> None:
        """An answer that the document would not allow is a fault of this emulator, but for the nulls."""
        plain = _without_nulls(told) if self.nulls else told
        self.violations += [f"answer {error}" for error in contract.answer_errors(method, path, status, plain)]

    def answer(self, route: str, identifier: str, body: Any, age_s: float) -> Any:
        """The data of one request that reached the application."""
        world = self.world
        with world.lock:
            world.tick()
            match route:
                case "types":
                    return {kind.name: _on_sale(kind) for kind in world.kinds.values()}
                case "regions":
                    return [region_json(name) for name in REGIONS]
                case "list":
                    return [self._told(one, status) for one, status in world.listed(age_s)]
                case "read":
                    return self._told(*world.read(identifier, age_s))
                case "launch":
                    return {"instance_ids": [self._launch(body).id]}
                case "terminate":
                    ended = world.terminate(_dict(body).get("instance_ids", []))
                    return {"terminated_instances": [self._told(one, "terminating") for one in ended]}
                case "keys":
                    return list(world.keys.values())
                case "add_key":
                    return self._add_key(_dict(body))
            world.remove_key(identifier)
            return {}

    def _launch(self, body: Any) -> Instance:
        told = _dict(body)
        if not told.get("region_name") or not told.get("instance_type_name"):
            raise wrong("region_name and instance_type_name are required.")
        return self.world.launch(told)

    def _add_key(self, body: dict[str, Any]) -> dict[str, str]:
        if not body.get("name") or not body.get("public_key"):
            raise wrong("This emulator makes no keys: name and public_key are required.")
        return self.world.add_key(body["name"], body["public_key"])

    def _told(self, one: Instance, status: str) -> dict[str, Any]:
        return one.as_json(status, nulls=self.nulls)

    def _tick(self) -> None:
        """Time passes for instances that nobody asks about."""
        while not self.ended.wait(self._tick_s):
            with self.world.lock:
                self.world.tick()


def _on_sale(kind: Any) -> dict[str, Any]:
    regions = [region_json(name) for name in kind.regions]
    return {"instance_type": kind.as_json(), "regions_with_capacity_available": regions}


def _dict(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise wrong("The body is not an object.")
    return body


def _without_nulls(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _without_nulls(value) for name, value in told.items() if value is not None}
    return [_without_nulls(one) for one in told] if isinstance(told, list) else told
