"""The wire: routes, rate limits, and the faults that a test asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tests.emulators.runpod import contract
from tests.emulators.runpod.problems import SOLD_OUT, Problem

if TYPE_CHECKING:
    from tests.emulators.runpod.emulator import RunPodEmulator

_ID = r"(?P<id>[^/]+)"
_ROUTES = [
    ("POST", "/v2/pods", "create"),
    ("GET", "/v2/pods", "list"),
    ("GET", f"/v2/pods/{_ID}", "read"),
    ("DELETE", f"/v2/pods/{_ID}", "delete"),
    ("POST", f"/v2/pods/{_ID}/action", "action"),
    ("GET", "/v2/catalog/gpus", "gpus"),
    ("GET", "/v2/catalog/cpus", "cpus"),
    ("GET", "/v2/billing/pods", "billing"),
    ("POST", "/graphql", "graphql"),
]


class Fault(StrEnum):
    """What goes wrong with one request."""

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


_WRONG = "Something went wrong. Please try again later or contact support."
_REFUSALS = {
    Fault.TOO_MANY: (429, "rate limit exceeded for the minute window"),
    Fault.ERROR_BEFORE: (500, _WRONG),
    Fault.SOLD_OUT: (400, SOLD_OUT),
    Fault.CONFLICT: (409, "action not allowed in this status"),
    Fault.REVOKED: (401, "invalid bearer token"),
    Fault.RETIRED: (410, "this API version was retired"),
}


class Server(ThreadingHTTPServer):
    """A free port of this machine, one thread for each request."""

    daemon_threads = True

    def __init__(self, emulator: RunPodEmulator) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.emulator = emulator

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def _any(self) -> None:
        emulator, parts = self.server.emulator, urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        route, identifier, path = _route(self.command, parts.path)
        fault = emulator.faults[route].pop(0) if emulator.faults[route] else None
        body = _json(raw)
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
            status, told = emulator.answer(route, identifier, query, body, own)
        except Problem as problem:
            status, told = problem.status, problem.as_json()
        if fault is Fault.DROP_RESPONSE:
            return
        if fault is Fault.ERROR_AFTER:
            status, told = 500, Problem(500, _WRONG).as_json()
        if fault is Fault.BLANK_AFTER:
            told = None
        if fault is Fault.HTML_AFTER:
            self._send(504, "text/html", b"<html><h1>504 Gateway Time-out</h1></html>")
            return
        kind = "application/json" if status < 400 else "application/problem+json"
        extra = [("Retry-After", emulator.retry_after)] if status == 429 else []
        self._send(status, kind, b"" if told is None else json.dumps(told).encode(), extra)

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _any

    def _refuse_first(self, fault: Fault | None, size: int, raw: bytes) -> None:
        """What is refused before the application sees it."""
        if fault in _REFUSALS:
            raise Problem(*_REFUSALS[fault])
        if fault is Fault.SECRET_ECHO:
            raise Problem(422, "Request validation failed.", [raw.decode()])
        if not self.headers.get("User-Agent"):
            raise Problem(403, "access denied")
        if size > 102_400:
            raise Problem(413, "request body too large")

    def _send(self, status: int, kind: str, data: bytes, extra: Iterable[tuple[str, str]] = ()) -> None:
        self.send_response(status)
        headers = [("Content-Type", kind), ("Content-Length", str(len(data)))]
        limits = [("RateLimit", '"minute";r=59;t=42'), ("RateLimit-Policy", '"minute";q=60;w=60')]
        for name, value in [*headers, *limits, *extra]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(int(self.server.emulator.world.clock.wall()))

    def log_message(self, *words: Any) -> None:
        """Quiet: what was asked stands in `requests`."""


def _route(method: str, path: str) -> tuple[str, str, str]:
    """The name of a route, the id in it, and its path as the document writes it."""
    for verb, pattern, name in _ROUTES:
        match = re.fullmatch(pattern, path)
        if verb == method and match:
            return name, match.groupdict().get("id", ""), pattern.replace(_ID, "{id}")
    return "none", "", path


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return None
