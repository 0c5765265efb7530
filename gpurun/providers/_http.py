"""Sends JSON requests over HTTPS to the clouds without an SDK. An unclear outcome is raised as `Unknown`.

A key is sent only over verified TLS (or to this machine, for tests). It is never sent to the target of a redirect, and
never part of an exception. The caller interprets the answer, including server errors. Requests are retried after "too
many requests"; a GET is also retried after a server error.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import SplitResult, urlencode, urlsplit
from urllib.request import (
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from gpurun import __version__
from gpurun.core.clock import Clock
from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import make_private
from gpurun.core.retry import Retry
from gpurun.providers.base import Throttled, Unknown

BODY_LIMIT_BYTES = 8_000_000
_LONGEST_PAUSE_S = 30.0
_READ_PAUSE_S = 0.5
_READ_PATIENCE_S = 10.0
_MOST_TURNS = 60


@dataclass(frozen=True)
class Answer:
    """A server's answer. The header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        """Return the parsed body, None if it is not JSON. Fractions are Decimals, because they may be prices."""
        try:
            return json.loads(self.text, parse_float=Decimal, parse_constant=_refuse_constant)
        except (ValueError, ArithmeticError, RecursionError):
            return None


class Gap:
    """Keeps a minimum time between requests, shared by all processes of this machine that use the same file."""

    def __init__(self, seconds: float, clock: Clock, path: Path | None = None) -> None:
        self._seconds = seconds
        self._clock = clock
        self._path = path
        self._free_mono = float("-inf")

    def wait(self) -> None:
        """Reserve the next turn and wait until it comes."""
        self._clock.sleep(self._reserve_turn_mono() - self._clock.monotonic())

    def begin(self) -> None:
        """Restart the gap now, because the request of the last turn took until now."""
        self._reserve_turn_mono(is_taken=True)

    def _reserve_turn_mono(self, *, is_taken: bool = False) -> float:
        """Reserve the next turn and return its time. Without a usable file, only the turns of this process count."""
        if self._path is not None:
            with suppress(OSError):
                make_private(self._path.parent)
                with exclusive(self._path):
                    turn_mono = self._take_turn_mono(self._parse_free_mono(self._path.read_text()), is_taken)
                    self._path.write_text(repr(self._free_mono))
                    return turn_mono
        return self._take_turn_mono(float("-inf"), is_taken)

    def _take_turn_mono(self, allowed_mono: float, is_taken: bool) -> float:
        free_mono, now_mono = max(allowed_mono, self._free_mono), self._clock.monotonic()
        turn_mono = max(free_mono, now_mono)
        self._free_mono = max(free_mono, now_mono + self._seconds) if is_taken else turn_mono + self._seconds
        return turn_mono

    def _parse_free_mono(self, text: str) -> float:
        """Parse when the next turn is free. A time from before a reboot is ignored, because the clock has restarted."""
        try:
            free_mono = float(text)
        except ValueError:
            return float("-inf")
        return free_mono if free_mono - self._clock.monotonic() <= _MOST_TURNS * self._seconds else float("-inf")


class Http:
    """Sends requests to one server with one key, with a minimum gap and limits on time and size, without redirects."""

    clock_ahead_s: float | None = None
    """How many seconds this machine's clock is ahead of the server's, by the last Date header; None without one."""

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str], clock: Clock, name: str, gap: Gap | None = None
    ) -> None:
        self._base = base_url.rstrip("/")
        self._opener = _opener(_parse_checked_url(base_url, name))
        _check_headers(headers, name)
        self._headers = {"User-Agent": f"gpurun/{__version__}", "Accept": "application/json", **headers}
        self._clock = clock
        self._name = name
        self._gap = gap

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float = 30.0,
        patience_s: float = 60.0,
    ) -> Answer:
        """Send a request and return the answer, whatever its status. `timeout_s` limits the whole exchange.

        After a 429, the request is retried when the server allows it, for up to `patience_s`. After a server error
        (5xx), a GET is retried twice within ten seconds. Raises Unknown if there is no complete answer, because the
        server may have carried out the request.
        """
        url = f"{self._base}{path}" + (f"?{urlencode(query)}" if query else "")
        slow = Retry(self._clock, 1.0, longest_s=_LONGEST_PAUSE_S, limit_s=patience_s, jitter=0.25)
        failed = Retry(self._clock, _READ_PAUSE_S, longest_s=2 * _READ_PAUSE_S, limit_s=_READ_PATIENCE_S, tries=2)
        while True:
            answer = self._send(method, url, body, timeout_s)
            if answer.status == 429:
                throttled = Throttled(f"{self._name} accepts no more requests for now (429)")
                slow.wait(throttled, at_least_s=_compute_retry_after_s(answer, self._clock.wall()))
            elif method != "GET" or answer.status < 500 or not failed.pauses():
                return answer

    def _send(self, method: str, url: str, body: Any, timeout_s: float) -> Answer:
        """Send one request and return the answer; Unknown if the answer is not complete."""
        if self._gap is not None:
            self._gap.wait()
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        place = f"{self._name} {method} {urlsplit(url).path}"
        crashpoint(f"before {place}")
        sent_wall = self._clock.wall()
        with _Limit(timeout_s) as limit:
            request = _Timed(url, data=data, headers=headers, method=method)
            request.limit = limit
            try:
                with self._opener.open(request, timeout=timeout_s) as response:
                    answer = _read(response)
            except (OSError, HTTPException, UnicodeError) as error:
                words = "it took too long" if limit.over else _describe_network_error(error)
                raise Unknown(f"{self._name} gave no complete answer: {words}") from error
            if limit.over:  # A body without a length looks complete when the connection is closed.
                raise Unknown(f"{self._name} gave no complete answer: it took too long")
        crashpoint(f"after {place}")
        self._compare_clocks(answer, (sent_wall + self._clock.wall()) / 2)
        return answer

    def _compare_clocks(self, answer: Answer, wall: float) -> None:
        """Store the clock skew. A Date header has whole seconds, so it is half a second early on average."""
        server_wall = _parse_date_wall(answer.headers.get("date", ""))
        if server_wall is not None:
            self.clock_ahead_s = round(wall - server_wall - 0.5, 1)


class _Limit:
    """Limits the time of a whole exchange: when the time is over, the socket is shut down, whatever it is doing.

    A socket's own time-out restarts with every byte, so a server that sends byte by byte could block the caller.
    """

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._sock: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Limit:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def watch(self, sock: socket.socket) -> None:
        """Take the connected socket to shut down; TimeoutError if the time is over already, before anything is sent."""
        self._sock = sock
        if self.over:
            raise TimeoutError

    def _end(self) -> None:
        self.over = True
        if self._sock is not None:
            with suppress(OSError):  # The socket may be closed already.
                socket.socket.shutdown(
                    self._sock, socket.SHUT_RDWR
                )  # Below TLS, which is not safe to use from this thread.


class _Timed(Request):
    """A request with the limit on its time."""

    limit: _Limit


class _Plain(HTTPConnection):
    def __init__(self, host: str, limit: _Limit, **named: Any) -> None:
        super().__init__(host, **named)
        self._limit = limit

    def connect(self) -> None:
        super().connect()
        self._limit.watch(self.sock)


class _Secure(_Plain, HTTPSConnection):
    """A connection over TLS, with the same time limit as `_Plain`; the limit watches the wrapped socket."""


class _PlainHandler(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        assert isinstance(req, _Timed)
        return self.do_open(partial(_Plain, limit=req.limit), req)


class _SecureHandler(HTTPSHandler):
    def __init__(self) -> None:
        self._verifying = ssl.create_default_context()
        super().__init__(context=self._verifying)

    def https_open(self, req: Request) -> HTTPResponse:
        assert isinstance(req, _Timed)
        return self.do_open(partial(_Secure, limit=req.limit, context=self._verifying), req)


class _NoJudging(HTTPErrorProcessor):
    """Returns every status as an answer: raises no error and follows no redirect."""

    def http_response(self, request: Request, response: HTTPResponse) -> HTTPResponse:
        return response

    https_response = http_response


def _opener(url: SplitResult) -> OpenerDirector:
    """Return an opener with the user's proxies. Plain HTTP uses none, because the key would reach them unencrypted."""
    if url.scheme == "http":
        return build_opener(_PlainHandler(), _NoJudging(), ProxyHandler({}))
    return build_opener(_SecureHandler(), _NoJudging())


def _parse_checked_url(url: str, name: str) -> SplitResult:
    """Return the parsed base URL; SetupError if it is not safe to send a key to it."""
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname) and parts.port != 0 and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        fits = False
    if not fits or not (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or ""))):
        raise SetupError(
            "url.not_safe",
            f"A key must not be sent to the base URL of {name}: {url!r}.",
            hint="It must begin with https:// and have no user, query or fragment; http:// is for this machine only.",
        )
    return parts


def _check_headers(headers: Mapping[str, str], name: str) -> None:
    """Raise a SetupError for a malformed key. The standard library's own error would contain the key."""
    if not all(value.isascii() and value.isprintable() for value in headers.values()):
        raise SetupError(
            "auth.bad_key",
            f"The key for {name} has characters that a key cannot have.",
            hint=f"Copy it again, without line breaks: gpurun auth set {name}.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _describe_network_error(error: Exception) -> str:
    """Return the reason of a network error, without the wrapping of urllib."""
    cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, OSError) else error
    reason = cause.strerror if isinstance(cause, OSError) else ""
    return reason or str(cause) or type(cause).__name__


def _read(response: HTTPResponse) -> Answer:
    """Read and return the whole answer; HTTPException if the body is truncated or too large."""
    data = response.read(BODY_LIMIT_BYTES + 1)
    if len(data) > BODY_LIMIT_BYTES:
        raise HTTPException(f"its body is larger than {BODY_LIMIT_BYTES} bytes")
    if response.length:
        raise HTTPException(f"its body ended {response.length} bytes too early")
    headers = {key.lower(): value for key, value in response.headers.items()}
    return Answer(response.status, headers, data.decode("utf-8", errors="replace"))


def _compute_retry_after_s(answer: Answer, wall: float) -> float:
    """Return how many seconds to wait after a 429, by the header Retry-After; 0 without one."""
    header = answer.headers.get("retry-after", "").strip()
    until = _parse_date_wall(header)
    if header.isascii() and header.isdigit():
        return float(header[:9])
    return until - (_parse_date_wall(answer.headers.get("date", "")) or wall) if until is not None else 0.0


def _parse_date_wall(date: str) -> float | None:
    """Return the wall time of an HTTP date; None if it is not a date."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
