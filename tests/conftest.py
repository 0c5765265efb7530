"""What every test gets: its own home, no network beyond this computer, and no key of a real cloud."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.loaders
import botocore.session
import pytest
from botocore.client import ClientCreator

if TYPE_CHECKING:
    from tests.emulators.s3 import S3Emulator

# Variables with which a test could reach a real cloud, which would bill it; `GPURUN_*` would change what a test means.
_KEYS = ("RUNPOD_", "LAMBDA_", "AWS_", "GPURUN_", "HF_TOKEN")
_KEPT = ("GPURUN_UPDATE_GOLDEN",)
_LOOPBACK = ("127.", "::1", "localhost")

# A shell makes its background processes ignore Ctrl-C, and children inherit that; some tests need Ctrl-C to work.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in parallel: two trainers with a thread for every core would only wait for each other. This is not a
# fixture, because module-scoped fixtures would run before it.
os.environ["OMP_NUM_THREADS"] = "1"


# The models of a hundred services are the same for every session: read them once per process, not once per client.
botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)  # type: ignore[attr-defined]


def _once_a_service(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `make` that runs once per service: each session gets the same result (EC2's class has 700 methods)."""
    made: dict[str, Any] = {}

    def once(creator: Any, service_name: str, *rest: Any, **more: Any) -> Any:
        if service_name not in made:
            made[service_name] = make(creator, service_name, *rest, **more)
        return made[service_name]

    return once


for _name in ("_load_service_model", "_create_client_class"):
    setattr(ClientCreator, _name, _once_a_service(getattr(ClientCreator, _name)))


# The marker for what a test module starts, by the names that occur in it; `make quick` skips these tests.
_STARTS = {
    "process": re.compile(
        r"\b(subprocess|multiprocessing|Popen|LocalMachine|LocalProvider|ScriptedSlurm|tiny_runs|somebody|Box)\b"
    ),
    "torch": re.compile(r"^ *(from|import) (torch|trainer)\b", re.MULTILINE),
    "sshd": re.compile(r"\bsshd\b"),
    "plots": re.compile(r"\b(matplotlib|report_samples)\b"),
    "boto": re.compile(r"\b(boto3|botocore|AwsEmulator|S3Emulator|s3: S3)\b"),
}


@functools.cache
def _started_by(module: Path) -> list[str]:
    text = module.read_text(encoding="utf-8")
    return [marker for marker, names in _STARTS.items() if names.search(text)]


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name a long value by its length: the names of all tests are sent to every worker, and one value has 21 MB."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with what its module starts."""
    for item in items:
        for marker in _started_by(item.path):
            item.add_marker(marker)


class NetworkBlocked(OSError):
    """The error for a test that tries to connect to another computer."""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the GPURUN_HOME of this test and its child processes; remove every cloud's key from the environment."""
    for name in list(os.environ):
        if name.startswith(_KEYS) and name not in _KEPT:
            monkeypatch.delenv(name)
    folder = tmp_path / "gpurun-home"
    monkeypatch.setenv("GPURUN_HOME", str(folder))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return folder


@pytest.fixture(autouse=True)
def same_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the same time zone and terminal width for every test; neither request nor refuse colour."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "LINES"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _refuse_far(address: Any) -> None:
    """Raise NetworkBlocked for an address that is neither loopback nor a Unix socket."""
    if isinstance(address, tuple) and not str(address[0]).startswith(_LOOPBACK):
        raise NetworkBlocked(f"a test may not connect to {address[0]!r}")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every connection and look-up that would leave this computer raise NetworkBlocked."""
    connect, connect_ex, sendto, look_up = (
        socket.socket.connect, socket.socket.connect_ex, socket.socket.sendto, socket.getaddrinfo,
    )  # fmt: skip

    def guarded_connect(self: socket.socket, address: Any) -> None:
        _refuse_far(address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        _refuse_far(address)
        return connect_ex(self, address)

    def guarded_sendto(self: socket.socket, data: bytes, *rest: Any) -> int:
        _refuse_far(rest[-1])
        return sendto(self, data, *rest)

    def guarded_look_up(host: Any, *rest: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name and name != socket.gethostname():
            _refuse_far((name,))
        return look_up(host, *rest, **named)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
    monkeypatch.setattr(socket.socket, "sendto", guarded_sendto)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Emulator]:
    """Yield an S3 emulator on this computer; the environment directs the AWS SDK to it."""
    from tests.emulators.s3 import S3Emulator

    with S3Emulator() as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        yield emulator


@pytest.fixture
def gpurun(own_home: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command line in this process: its exit code, standard output and error."""
    from tests import command_line

    def run(*words: str) -> tuple[int, str, str]:
        done = command_line.gpurun(*words)
        return done.returncode, done.stdout, done.stderr

    return run
