"""The common base of the emulators: each serves one account on a loopback address, with a clock and scripted faults."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

ID = r"(?P<id>[^/]+)"
_POLL_S = 0.02


class Emulator:
    """An account that exists from `start` to `stop`. A subclass provides `world`, `environment` and `_serve`.

    With `tick_s` None, time passes only when a request arrives or `tick` is called.
    """

    world: Any

    def __init__(self, tick_s: float | None) -> None:
        self.faults: defaultdict[str, list[Any]] = defaultdict(list)
        self.ended = threading.Event()
        self._tick_s = tick_s
        self._threads: list[threading.Thread] = []

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that point gpurun at this emulator, with a valid key."""
        raise NotImplementedError

    @property
    def origin(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}"

    def start(self) -> Self:
        self._server = self._serve()
        self._threads = [threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)]
        if self._tick_s is not None:
            self._threads.append(threading.Thread(target=self._let_time_pass, daemon=True))
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

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def fail(self, route: str, *faults: Any) -> None:
        """Let the next requests of a route fail with these faults, one per request; None lets a request succeed."""
        self.faults[route] += faults

    def next_fault(self, route: str) -> Any:
        return self.faults[route].pop(0) if self.faults[route] else None

    def tick(self) -> None:
        """Bring the world up to the present time of its clock."""
        with self.world.lock:
            self.world.tick()

    def _serve(self) -> Any:
        """Return the server, bound to a free port on loopback."""
        raise NotImplementedError

    def _let_time_pass(self) -> None:
        """Tick at the interval `tick_s`, so that time passes between requests too."""
        while not self.ended.wait(self._tick_s):
            self.tick()


class HttpEmulator(Emulator):
    """An emulator that answers in JSON itself. `requests` has the method, route and body of each request.

    `violations` lists where requests and answers break the provider's OpenAPI document.
    """

    handler: ClassVar[type[Handler]]

    def __init__(self, tick_s: float | None) -> None:
        super().__init__(tick_s)
        self.requests: list[tuple[str, str, Any]] = []
        self.violations: list[str] = []

    def count(self, route: str) -> int:
        return sum(1 for _, name, _ in self.requests if name == route)

    def bodies(self, route: str) -> list[Any]:
        return [body for _, name, body in self.requests if name == route]

    def _serve(self) -> Server:
        return Server(self, self.handler)


class Server(ThreadingHTTPServer):
    """An HTTP server on a free port of 127.0.0.1, with one thread for each request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, emulator: Emulator, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.emulator = emulator

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore every error of a request, because a client may have closed its connection."""


class Handler(BaseHTTPRequestHandler):
    """The handler of one request, of any method; a subclass answers it in `any_method`.

    The Date header of the answer has the world's time.
    """

    server: Server

    def any_method(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.any_method()

    do_POST = do_DELETE = do_PATCH = do_PUT = do_GET

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, kind: str, data: bytes, extra: Iterable[tuple[str, str]] = ()) -> None:
        self.send_response(status)
        for name, value in [("Content-Type", kind), ("Content-Length", str(len(data))), *extra]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(int(self.server.emulator.world.clock.wall()))

    def log_message(self, *words: Any) -> None:
        """Log nothing, because `requests` records every request."""


def route_of(routes: Sequence[tuple[str, str, str]], method: str, path: str) -> tuple[str, str, str]:
    """Return a route's name, the id in the path, and the path as the provider's document writes it.

    The name is "none" if no route matches.
    """
    for verb, pattern, name in routes:
        match = re.fullmatch(pattern, path)
        if verb == method and match:
            return name, match.groupdict().get("id", ""), pattern.replace(ID, "{id}")
    return "none", "", path


def json_of(raw: bytes) -> Any:
    """Return a body parsed as JSON; None if it is empty or cannot be parsed."""
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return None


def serve_by_hand(emulate: Callable[..., Emulator], fake: Any, real: Callable[[Path], Any]) -> None:
    """Print the variables that point gpurun at an emulator, then run it until Ctrl-C; `--fake` boots no machines."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with TemporaryDirectory() as folder:
        boot = fake if "--fake" in sys.argv[1:] else real(Path(folder))
        with emulate(boot=boot) as emulator:
            words = " ".join(f"{name}={value}" for name, value in emulator.environment.items())
            print(f"export {words}", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
