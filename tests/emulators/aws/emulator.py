"""The front of moto: it checks keys, injects faults, answers some actions itself and passes the others on to moto."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

from gpurun.core.clock import Clock, SystemClock
from tests.emulators.aws import ec2, services
from tests.emulators.aws.calls import AwsError, Call, Fault, Reply, error_reply, read_call
from tests.emulators.aws.guest import Boot, FakeGuest
from tests.emulators.aws.rules import Rules
from tests.emulators.aws.world import World
from tests.emulators.serving import Emulator

# Otherwise moto loads thousands of images that no test boots.
os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
KEY, SECRET = "AKIAEMULATED000EXAMPLE", "emulated-secret-access-key-0123456789"
_one_at_a_time = threading.Lock()  # moto's state belongs to the whole process.


class AwsEmulator(Emulator):
    """An emulated AWS account. `world` is the truth; `rules` holds what exists and what is allowed.

    `calls` has the action and region of each request, `launches` the parameters of each RunInstances.
    """

    def __init__(self, *, clock: Clock | None = None, boot: Boot = FakeGuest, tick_s: float | None = 0.05) -> None:
        super().__init__(tick_s)
        self.world = World(clock or SystemClock(), boot)
        self.rules = Rules()
        self.calls: list[tuple[str, str]] = []
        self.launches: list[dict[str, str]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.origin,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            _one_at_a_time.release()

    def count(self, action: str, region: str | None = None) -> int:
        return sum(1 for name, place in self.calls if name == action and region in (None, place))

    def _serve(self) -> Any:
        from moto.moto_api._internal import moto_api_backend
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        if not _one_at_a_time.acquire(timeout=60):
            raise RuntimeError("another emulator of AWS runs in this process")
        moto_api_backend.reset()
        self._moto = DomainDispatcherApplication(create_backend_app)
        server = make_server("127.0.0.1", 0, self._door, threaded=True, request_handler=_Handler)
        server.world = self.world
        return server

    def _door(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        call = read_call(environ)
        with self.world.lock:
            fault = None if "DryRun" in call.form else self.next_fault(call.action)
            if fault is Fault.DROP_REQUEST:
                return _cut(environ)
            try:
                reply = self._answer(call, fault)
            except AwsError as error:
                reply = error_reply(call, error)
        if fault is Fault.DROP_ANSWER:
            return _cut(environ)
        if fault is Fault.NOT_JSON:
            reply = Reply(200, b"<html>a proxy wants you to log in</html>", "text/html")
        if fault is Fault.ERROR_AFTER:
            reply = error_reply(call, AwsError("InternalError", "An internal error has occurred", 500))
        headers = [("Content-Type", reply.kind), ("Content-Length", str(len(reply.body)))]
        start_response(f"{reply.status} -", headers)
        return [reply.body]

    def _answer(self, call: Call, fault: Fault | None) -> Reply:
        """Answer a request; tick the world before and after it."""
        self.calls.append((call.action, call.region))
        _refuse(fault)
        self.rules.check(call, KEY)
        if call.form.get("DryRun", "").lower() == "true":
            raise AwsError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
        self.world.tick()
        if call.action == "RunInstances":
            self.launches.append(call.form)
        own = ec2.ANSWERS.get(call.action) if call.service == "ec2" else services.ANSWERS.get(call.action)
        lie = fault is Fault.LIE
        reply = own(call, self.world, self.rules, self._pass_on, lie) if own else self._pass_on(call)
        self.world.tick()
        return reply

    def _pass_on(self, call: Call) -> Reply:
        """Return moto's reply to the request."""
        head: dict[str, Any] = {}

        def start_response(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            head.update(status=int(status.split()[0]), headers=dict(headers))

        body = b"".join(self._moto(call.environ, start_response))
        kind = {name.lower(): value for name, value in head["headers"].items()}.get("content-type", "text/xml")
        return Reply(head["status"], body, kind)


class _Handler(WSGIRequestHandler):
    server: Any

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(int(self.server.world.clock.wall()))

    def log(self, *args: Any) -> None:
        """Log nothing."""


def _cut(environ: dict[str, Any]) -> list[bytes]:
    """Close the connection without an answer."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def _refuse(fault: Fault | None) -> None:
    """Raise the faults that end a request before it has an effect."""
    if fault is Fault.THROTTLED:
        raise AwsError("RequestLimitExceeded", "Request limit exceeded.", 503)
    if fault is Fault.ERROR:
        raise AwsError("InternalError", "An internal error has occurred", 500)
    if fault is Fault.EXPIRED:
        raise AwsError("ExpiredToken", "The security token included in the request is expired")
    if fault is Fault.UNSEEN_GROUP:
        raise AwsError("InvalidGroup.NotFound", "The security group does not exist")
    if fault is Fault.NO_CAPACITY:
        words = "We currently do not have sufficient capacity in the Availability Zone you requested."
        raise AwsError("InsufficientInstanceCapacity", words, 500)
