"""The wire: routes, keys, rate limits, and the faults that a test asks for."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tests.emulators.lambda_cloud.problems import Problem, sold_out

if TYPE_CHECKING:
    from tests.emulators.lambda_cloud.emulator import LambdaEmulator

BASE = "/api/v1"
_ID = r"(?P<id>[^/]+)"
_ROUTES = [
    ("GET", "/instance-types", "types"),
    ("GET", "/regions", "regions"),
    ("GET", "/instances", "list"),
    ("GET", f"/instances/{_ID}", "read"),
    ("POST", "/instance-operations/launch", "launch"),
    ("POST", "/instance-operations/terminate", "terminate"),
    ("GET", "/ssh-keys", "keys"),
    ("POST", "/ssh-keys", "add_key"),
    ("DELETE", f"/ssh-keys/{_ID}", "remove_key"),
]
_STALE_S = 60.0


class Fault(StrEnum):
    """What goes wrong with one request."""

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
    """It happens, and the answer is this data instead of its own."""

    data: Any


Trouble = Fault | Problem | Lie
"""What can go wrong with a request. A Problem is answered as it stands, before anything happens."""


class Server(ThreadingHTTPServer):
    """A free port of this machine, one thread for each request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, emulator: LambdaEmulator) -> None:
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
        fault = emulator.next_fault(route)
        body = _json(raw)
        emulator.requests.append((self.command, route, body))
        if fault is Fault.DROP_REQUEST:
            return
        if fault is Fault.HANG_BEFORE:
            emulator.ended.wait()
            return
        if fault is Fault.EDGE_BEFORE or not self.headers.get("User-Agent", "").startswith("gpurun"):
            self._send(403, "text/html", _EDGE % 1010)
            return
        injected = self._injected(fault, raw)
        if injected is not None:
            self._reply(None, injected.status, injected.as_json())
            return
        try:
            self._admit(route)
            emulator.check_request(self.command, path, set(parse_qs(parts.query)), body)
            age_s = _STALE_S if fault is Fault.STALE else 0.0
            status, told = 200, {"data": emulator.answer(route, identifier, body, age_s)}
            if fault is Fault.TWICE:
                emulator.answer(route, identifier, body, age_s)
        except Problem as problem:
            status, told = problem.status, problem.as_json()
        emulator.check_answer(self.command, path, status, told)
        self._reply(fault, status, told)

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _any

    def _injected(self, fault: Trouble | None, raw: bytes) -> Problem | None:
        """The error that a test wants answered before anything is looked at."""
        if isinstance(fault, Problem):
            return fault
        if fault is Fault.ECHO:
            told = f"{raw.decode()} {self.headers.get('Authorization')}"
            return Problem(400, "global/invalid-parameters", told)
        return _REFUSALS.get(fault) if isinstance(fault, Fault) else None

    def _admit(self, route: str) -> None:
        """The key, then the rates."""
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Basic":
            given = base64.b64decode(given).decode().partition(":")[0]
        emulator = self.server.emulator
        if given not in emulator.api_keys:
            raise Problem(401, "global/invalid-api-key")
        with emulator.world.lock:
            if not emulator.limits.takes(route):
                raise Problem(429, "global/too-many-requests")
        if route == "none":
            raise Problem(404, "global/not-found")

    def _reply(self, fault: Trouble | None, status: int, told: Any) -> None:
        """Answer, unless that is what goes wrong."""
        if fault is Fault.DROP_RESPONSE:
            return
        if fault is Fault.HANG_AFTER:
            self.server.emulator.ended.wait()
            return
        if fault is Fault.EDGE_AFTER:
            self._send(524, "text/html", _EDGE % 524)
            return
        if fault is Fault.BLANK_AFTER:
            self._send(200, "application/json", b"")
            return
        if isinstance(fault, Lie):
            status, told = 200, {"data": fault.data}
        if fault is Fault.ERROR_AFTER:
            status, told = 500, Problem(500, "global/internal-error").as_json()
        if fault is Fault.UNAVAILABLE_AFTER:
            status, told = 503, Problem(503, "provider/internal-unavailable").as_json()
        retry = self.server.emulator.retry_after
        extra = [("Retry-After", retry)] if status == 429 and retry else []
        self._send(status, "application/json", json.dumps(told).encode(), extra)

    def _send(self, status: int, kind: str, data: bytes, extra: Iterable[tuple[str, str]] = ()) -> None:
        self.send_response(status)
        for name, value in [("Content-Type", kind), ("Content-Length", str(len(data))), *extra]:
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
        match = re.fullmatch(BASE + pattern, path)
        if verb == method and match:
            return name, match.groupdict().get("id", ""), pattern.replace(_ID, "{id}")
    return "none", "", path


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return None
