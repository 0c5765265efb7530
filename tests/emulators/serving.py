"""What every emulator is from outside: one account on one loopback address, where time passes and requests go wrong."""

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
    """An account from `start` to `stop`. A subclass has its `world`, and says who serves it and how the user finds it.

    With `tick_s` of None time passes only when somebody asks.
    """

    world: Any

    def __init__(self, tick_s: float | None) -> None:
        self.faults: defaultdict[str, list[Any]] = defaultdict(list)
        self.ended = threading.Event()
        self._tick_s = tick_s
        self._threads: list[threading.Thread] = []

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that send gpurun here, with a good key."""
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
        """Have the next requests of a route go wrong in these ways, one each; None lets one pass."""
        self.faults[route] += faults

    def next_fault(self, route: str) -> Any:
        return self.faults[route].pop(0) if self.faults[route] else None

    def tick(self) -> None:
        """Bring the world to where it is by now."""
        with self.world.lock:
            self.world.tick()

    def _serve(self) -> Any:
        """Return the server, bound to a free port of this machine."""
        raise NotImplementedError

    def _let_time_pass(self) -> None:
        """Let time pass even between requests."""
        while not self.ended.wait(self._tick_s):
            self.tick()


class HttpEmulator(Emulator):
    """An emulator that speaks JSON itself. `requests` has the method, route and body of each request.

    `violations` are requests and answers that the provider's OpenAPI document does not allow.
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
    """A free port of this machine, one thread for each request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, emulator: Emulator, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.emulator = emulator

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hung up."""


class Handler(BaseHTTPRequestHandler):
    """One request, of any method, which a subclass answers; the time in the answer is the world's."""

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
        """Log nothing: `requests` has it all."""


def route_of(routes: Sequence[tuple[str, str, str]], method: str, path: str) -> tuple[str, str, str]:
    """Return a route's name, the id in it, and its path as the provider's document writes it; "none" for no route."""
    for verb, pattern, name in routes:
        match = re.fullmatch(pattern, path)
        if verb == method and match:
            return name, match.groupdict().get("id", ""), pattern.replace(ID, "{id}")
    return "none", "", path


def json_of(raw: bytes) -> Any:
    """Return a body as JSON; None where there is none, or nothing that can be read."""
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return None


def serve_by_hand(emulate: Callable[..., Emulator], fake: Any, real: Callable[[Path], Any]) -> None:
    """Run an emulator alone until Ctrl-C, once it has said how to point gpurun at it; `--fake` boots no machines."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with TemporaryDirectory() as folder:
        boot = fake if "--fake" in sys.argv[1:] else real(Path(folder))
        with emulate(boot=boot) as emulator:
            words = " ".join(f"{name}={value}" for name, value in emulator.environment.items())
            print(f"export {words}", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
