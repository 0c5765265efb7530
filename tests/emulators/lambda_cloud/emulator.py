"""The emulated account behind the HTTP server: every route, and the switches that a test sets."""

from __future__ import annotations

from typing import Any

from gpurun.core.clock import Clock, SystemClock
from tests.emulators.lambda_cloud import contract
from tests.emulators.lambda_cloud.catalog import REGIONS, region_json
from tests.emulators.lambda_cloud.guest import Boot, FakeGuest
from tests.emulators.lambda_cloud.instance import Instance
from tests.emulators.lambda_cloud.limits import Limits
from tests.emulators.lambda_cloud.problems import wrong
from tests.emulators.lambda_cloud.server import BASE, Door
from tests.emulators.lambda_cloud.world import World
from tests.emulators.serving import HttpEmulator

KEY = "secret_gpurun-test_0123456789abcdef0123456789abcdef.0123456789abcdef"


class LambdaEmulator(HttpEmulator):
    """An emulated Lambda account.

    With `nulls`, unknown values are null, which the document does not allow but the real service sends.
    """

    handler = Door

    def __init__(self, *, clock: Clock | None = None, boot: Boot = FakeGuest, tick_s: float | None = 0.05) -> None:
        super().__init__(tick_s)
        self.world = World(clock or SystemClock(), boot)
        self.limits = Limits(self.world.clock)
        self.api_keys = {KEY}
        self.denied: set[tuple[str, str]] = set()  # A key and a route that it must not use.
        self.retry_after = ""
        self.nulls = False

    @property
    def base_url(self) -> str:
        return f"{self.origin}{BASE}"

    @property
    def environment(self) -> dict[str, str]:
        return {"LAMBDA_API_BASE_URL": self.base_url, "LAMBDA_API_KEY": KEY}

    def check_request(self, method: str, path: str, query: set[str], body: Any) -> None:
        """Refuse a request that breaks the document, and record each violation."""
        errors = contract.request_errors(method, path, query, body)
        self.violations += [f"request {error}" for error in errors]
        if errors:
            raise wrong("; ".join(errors))

    def check_answer(self, method: str, path: str, status: int, payload: Any) -> None:
        """Record where an answer breaks the document, which is a fault of this emulator; `nulls` permits null."""
        plain = _without_nulls(payload) if self.nulls else payload
        self.violations += [f"answer {error}" for error in contract.answer_errors(method, path, status, plain)]

    def answer(self, route: str, identifier: str, body: Any, age_s: float) -> Any:
        """Carry out a request and return its data; a list or a read shows the state at least `age_s` seconds ago."""
        world = self.world
        with world.lock:
            world.tick()
            match route:
                case "types":
                    return {kind.name: _on_sale(kind) for kind in world.kinds.values()}
                case "regions":
                    return [region_json(name) for name in REGIONS]
                case "list":
                    return [self._as_json(instance, status) for instance, status in world.listed(age_s)]
                case "read":
                    return self._as_json(*world.read(identifier, age_s))
                case "launch":
                    return {"instance_ids": [self._launch(body).id]}
                case "terminate":
                    ended = world.terminate(_dict(body).get("instance_ids", []))
                    return {"terminated_instances": [self._as_json(instance, "terminating") for instance in ended]}
                case "keys":
                    return list(world.keys.values())
                case "add_key":
                    return self._add_key(_dict(body))
            world.remove_key(identifier)
            return {}

    def _launch(self, body: Any) -> Instance:
        fields = _dict(body)
        if not fields.get("region_name") or not fields.get("instance_type_name"):
            raise wrong("region_name and instance_type_name are required.")
        return self.world.launch(fields)

    def _add_key(self, body: dict[str, Any]) -> dict[str, str]:
        if not body.get("name") or not body.get("public_key"):
            raise wrong("This emulator makes no keys: name and public_key are required.")
        return self.world.add_key(body["name"], body["public_key"])

    def _as_json(self, instance: Instance, status: str) -> dict[str, Any]:
        return instance.as_json(status, nulls=self.nulls)


def _on_sale(kind: Any) -> dict[str, Any]:
    regions = [region_json(name) for name in kind.regions]
    return {"instance_type": kind.as_json(), "regions_with_capacity_available": regions}


def _dict(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise wrong("The body is not an object.")
    return body


def _without_nulls(payload: Any) -> Any:
    if isinstance(payload, dict):
        return {name: _without_nulls(value) for name, value in payload.items() if value is not None}
    return [_without_nulls(item) for item in payload] if isinstance(payload, list) else payload
