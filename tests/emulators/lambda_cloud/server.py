"""The HTTP server: routes, keys, rate limits, and the faults that a test requests."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from tests.emulators.lambda_cloud.problems import Problem, sold_out
from tests.emulators.serving import ID, Handler, json_of, route_of

if TYPE_CHECKING:
    from tests.emulators.lambda_cloud.emulator import LambdaEmulator

BASE = "/api/v1"
_ROUTES = [
    ("GET", "/instance-types", "types"),
    ("GET", "/regions", "regions"),
    ("GET", "/instances", "list"),
    ("GET", f"/instances/{ID}", "read"),
    ("POST", "/instance-operations/launch", "launch"),
    ("POST", "/instance-operations/terminate", "terminate"),
    ("GET", "/ssh-keys", "keys"),
    ("POST", "/ssh-keys", "add_key"),
    ("DELETE", f"/ssh-keys/{ID}", "remove_key"),
]
_STALE_S = 60.0


class Fault(StrEnum):
    """A fault of one request."""

    DROP_REQUEST = "the connection ends before anything happens"
    DROP_RESPONSE = "it happens, and the connection ends"
    HANG_BEFORE = "nothing happens, and nothing is answered"
    HANG_AFTER = "it happens, and nothing is answered"
    ERROR_BEFORE = "500, and nothing happened"
    ERROR_AFTER = "500, and it happened"
    UNAVAILABLE_AFTER = "503 of a service behind it, and it happened"
    EDGE_BEFORE = "403 in HTML: the edge does not like the client"
    EDGE_AFTER = "it happens, and the edge answers 524 in HTML"
    BLANK_AFTER = "it happens, and the answer says nothing"
    TOO_MANY = "429"
    TWICE = "a launch makes two"
    SOLD_OUT = "what the list of types just had is gone"
    REVOKED = "401: the key was revoked"
    STALE = "what is told is a minute old"
    ECHO = "400 that repeats what was sent"


_REFUSALS = {
    Fault.ERROR_BEFORE: Problem(500, "global/internal-error"),
    Fault.TOO_MANY: Problem(429, "global/too-many-requests"),
    Fault.SOLD_OUT: sold_out(),
    Fault.REVOKED: Problem(401, "global/invalid-api-key"),
}
_EDGE = b"<!DOCTYPE html><html><head><title>Attention Required! | Cloudflare</title></head><body>Error %d</body></html>"


@dataclass(frozen=True)
class Lie:
    """A fault: the request takes effect, but its answer contains this data instead of its own."""

    data: Any


Trouble = Fault | Problem | Lie
"""Everything that `fail` accepts. A Problem becomes the answer, and the request has no effect."""


class Door(Handler):
    """The handler of one request to Lambda."""

    @property
    def emulator(self) -> LambdaEmulator:
        return cast("LambdaEmulator", self.server.emulator)

    def any_method(self) -> None:
        emulator, parts = self.emulator, urlsplit(self.path)
        raw = self.body()
        route, identifier, path = route_of(_ROUTES, self.command, parts.path.removeprefix(BASE))
        fault = emulator.next_fault(route)
        body = json_of(raw)
        emulator.requests.append((self.command, route, body))
        if fault is Fault.DROP_REQUEST:
            return
        if fault is Fault.HANG_BEFORE:
            emulator.ended.wait()
            return
        if fault is Fault.EDGE_BEFORE or not self.headers.get("User-Agent", "").startswith("gpurun"):
            self.send(403, "text/html", _EDGE % 1010)
            return
        injected = self._injected(fault, raw)
        if injected is not None:
            self._reply(None, injected.status, injected.as_json())
            return
        try:
            self._admit(route)
            emulator.check_request(self.command, path, set(parse_qs(parts.query)), body)
            age_s = _STALE_S if fault is Fault.STALE else 0.0
            status, payload = 200, {"data": emulator.answer(route, identifier, body, age_s)}
            if fault is Fault.TWICE:
                emulator.answer(route, identifier, body, age_s)
        except Problem as problem:
            status, payload = problem.status, problem.as_json()
        emulator.check_answer(self.command, path, status, payload)
        self._reply(fault, status, payload)

    def _injected(self, fault: Trouble | None, raw: bytes) -> Problem | None:
        """Return the error that a test requested in place of any handling; None if it requested none."""
        if isinstance(fault, Problem):
            return fault
        if fault is Fault.ECHO:
            echo = f"{raw.decode()} {self.headers.get('Authorization')}"
            return Problem(400, "global/invalid-parameters", echo)
        return _REFUSALS.get(fault) if isinstance(fault, Fault) else None

    def _admit(self, route: str) -> None:
        """Raise a Problem for a wrong key, a denied route, a request over the rate limits, or an unknown route."""
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Basic":
            given = base64.b64decode(given).decode().partition(":")[0]
        emulator = self.emulator
        if given not in emulator.api_keys:
            raise Problem(401, "global/invalid-api-key")
        if (given, route) in emulator.denied:
            raise Problem(403, "global/forbidden")
        with emulator.world.lock:
            if not emulator.limits.takes(route):
                raise Problem(429, "global/too-many-requests")
        if route == "none":
            raise Problem(404, "global/not-found")

    def _reply(self, fault: Trouble | None, status: int, payload: Any) -> None:
        """Send the answer, changed by the fault."""
        if fault is Fault.DROP_RESPONSE:
            return
        if fault is Fault.HANG_AFTER:
            self.emulator.ended.wait()
            return
        if fault is Fault.EDGE_AFTER:
            self.send(524, "text/html", _EDGE % 524)
            return
        if fault is Fault.BLANK_AFTER:
            self.send(200, "application/json", b"")
            return
        if isinstance(fault, Lie):
            status, payload = 200, {"data": fault.data}
        if fault is Fault.ERROR_AFTER:
            status, payload = 500, Problem(500, "global/internal-error").as_json()
        if fault is Fault.UNAVAILABLE_AFTER:
            status, payload = 503, Problem(503, "provider/internal-unavailable").as_json()
        retry = self.emulator.retry_after
        extra = [("Retry-After", retry)] if status == 429 and retry else []
        self.send(status, "application/json", json.dumps(payload).encode(), extra)
