"""The HTTP server: routes, rate limits, and the faults that a test requests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, cast
from urllib.parse import parse_qs, urlsplit

from tests.emulators.runpod import contract
from tests.emulators.runpod.problems import SOLD_OUT, Problem
from tests.emulators.serving import ID, Handler, json_of, route_of

if TYPE_CHECKING:
    from tests.emulators.runpod.emulator import RunPodEmulator

_ROUTES = [
    ("POST", "/v2/pods", "create"),
    ("GET", "/v2/pods", "list"),
    ("GET", f"/v2/pods/{ID}", "read"),
    ("PATCH", f"/v2/pods/{ID}", "update"),
    ("DELETE", f"/v2/pods/{ID}", "delete"),
    ("POST", f"/v2/pods/{ID}/action", "action"),
    ("GET", "/v2/catalog/gpus", "gpus"),
    ("GET", "/v2/catalog/cpus", "cpus"),
    ("GET", "/v2/catalog/datacenters", "datacenters"),
    ("GET", "/v2/billing/pods", "billing"),
    ("POST", "/graphql", "graphql"),
]


class Fault(StrEnum):
    """A fault of one request."""

    DROP_REQUEST = "the connection ends before anything happens"
    DROP_RESPONSE = "it happens, and the connection ends"
    ERROR_BEFORE = "500, and nothing happened"
    ERROR_AFTER = "500, and it happened"
    HTML_AFTER = "it happens, and an edge answers 504 in HTML"
    BLANK_AFTER = "it happens, and the answer says nothing"
    CONFLICT = "409, and nothing happened"
    REVOKED = "401: the key was revoked"
    RETIRED = "410: this way of asking is retired"
    TOO_MANY = "429 with Retry-After"
    TWICE = "a create makes two"
    SOLD_OUT = "what the catalogue just had is gone"
    SECRET_ECHO = "422 that repeats what was sent"


_LIMITS = [("RateLimit", '"minute";r=59;t=42'), ("RateLimit-Policy", '"minute";q=60;w=60')]
_WRONG = "Something went wrong. Please try again later or contact support."
_REFUSALS = {
    Fault.TOO_MANY: (429, "rate limit exceeded for the minute window"),
    Fault.ERROR_BEFORE: (500, _WRONG),
    Fault.SOLD_OUT: (400, SOLD_OUT),
    Fault.CONFLICT: (409, "action not allowed in this status"),
    Fault.REVOKED: (401, "invalid bearer token"),
    Fault.RETIRED: (410, "this API version was retired"),
}


class Door(Handler):
    """The handler of one request to RunPod."""

    def any_method(self) -> None:
        emulator, parts = cast("RunPodEmulator", self.server.emulator), urlsplit(self.path)
        raw = self.body()
        route, identifier, path = route_of(_ROUTES, self.command, parts.path)
        fault = emulator.next_fault(route)
        body = json_of(raw)
        emulator.requests.append((self.command, route, body))
        if fault is Fault.DROP_REQUEST:
            return
        if fault is Fault.TWICE:
            emulator.answer("create", "", {}, body, None)
        try:
            self._refuse_first(fault, len(raw), raw)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            if route not in ("graphql", "none"):
                emulator.violations += contract.unknown_query(self.command, path, set(query) - {"cursor"})
            emulator.world.tick()
            key = self.headers.get("Authorization", "").removeprefix("Bearer ") or query.get("api_key", "")
            own = emulator.check_key(route, identifier, key)
            if route == "none":
                raise Problem(404, "resource not found")
            status, payload = emulator.answer(route, identifier, query, body, own)
        except Problem as problem:
            status, payload = problem.status, problem.as_json()
        if fault is Fault.DROP_RESPONSE:
            return
        if fault is Fault.ERROR_AFTER:
            status, payload = 500, Problem(500, _WRONG).as_json()
        if fault is Fault.BLANK_AFTER:
            payload = None
        if fault is Fault.HTML_AFTER:
            self.send(504, "text/html", b"<html><h1>504 Gateway Time-out</h1></html>")
            return
        kind = "application/json" if status < 400 else "application/problem+json"
        extra = [("Retry-After", emulator.retry_after)] if status == 429 else []
        self.send(status, kind, b"" if payload is None else json.dumps(payload).encode(), extra)

    def _refuse_first(self, fault: Fault | None, size: int, raw: bytes) -> None:
        """Raise the Problem of a fault, or of a request that the service refuses before it reads the key."""
        if fault in _REFUSALS:
            raise Problem(*_REFUSALS[fault])
        if fault is Fault.SECRET_ECHO:
            raise Problem(422, "Request validation failed.", [raw.decode()])
        if not self.headers.get("User-Agent"):
            raise Problem(403, "access denied")
        if size > 102_400:
            raise Problem(413, "request body too large")

    def send(self, status: int, kind: str, data: bytes, extra: Iterable[tuple[str, str]] = ()) -> None:
        super().send(status, kind, data, [*_LIMITS, *extra])
