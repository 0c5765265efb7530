"""Fixtures with the real agent in a folder. Trainers are a few lines of Python, and no process outlives its test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.records import Address
from gpurun.remote.client import FarSide
from gpurun.remote.key_pairs import make_keys
from gpurun.remote.local_machine import LocalMachine
from gpurun.remote.messages import Status
from gpurun.remote.ssh import RemoteMachine
from tests.emulators import sshd
from tests.emulators.proxy import Proxy

PYTHON = [sys.executable, "-I", "-S", "-c"]


class Box:
    """A local machine in a folder, with the agent installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bundle").mkdir(parents=True)
        self.token = f"gr-test-{uuid4().hex[:8]}"
        self.machine = LocalMachine(folder, self.token)
        self.far = FarSide(self.machine, python=sys.executable)
        self.far.install_agent()

    def job(self, script: str, soft_s: float = 60, hard_s: float = 60, save_s: float = 5, **env: str) -> dict[str, Any]:
        """Return a job whose trainer is this script; it runs in `bundle`, where it may leave files."""
        if not (self.folder / "agent" / "shipped.json").exists():
            self.machine.put("agent/shipped.json", b'{"manifest_sha256": "by hand"}')
        now = time.time()
        argv = [*PYTHON, "import os, signal, subprocess, sys, time\n" + script]
        stops = {"soft_stop_wall": now + soft_s, "hard_stop_wall": now + hard_s, "save_s": save_s}
        stops |= {"soft_stop_s": soft_s, "hard_stop_s": hard_s}
        return {"v": 1, "run": "test-1", "argv": argv, "cwd": "bundle", "env": env, **stops}

    def status(self) -> Status:
        return self.far.poll({}).status

    def until(self, true: Callable[[], Any], limit_s: float = 30.0) -> Any:
        """Wait until `true` returns a true value, and return that value; fail after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not (value := true()):
            assert time.monotonic() < end, "it did not become so"
            time.sleep(0.02)
        return value

    def until_exited(self) -> Status:
        """Wait until the trainer has exited, and return the status.

        A poll starts a process, so look mostly at exit.json.
        """

        def ended() -> Status | None:
            exit_json, soon = self.folder / "agent" / "exit.json", time.monotonic() + 0.3
            while not exit_json.exists() and time.monotonic() < soon:
                time.sleep(0.01)
            status = self.status()
            return status if status.state == "exited" else None

        return self.until(ended)

    def text(self, name: str) -> str:
        """Return what the trainer wrote to a file of `bundle`; an empty text if there is no such file."""
        path = self.folder / "bundle" / name
        return path.read_text() if path.exists() else ""

    def agent_file(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "agent" / name).read_bytes())

    def agent_argv(self, verb: str, *options: str) -> list[str]:
        return [sys.executable, "-I", "-S", "agent.pyz", verb, "--root", ".", *options]

    def alter_agent(self, old: str, new: str) -> None:
        """Replace a text in the source of this box's agent; exactly one file must contain it."""
        alter_agent(self.folder, old, new)

    def living(self) -> list[int]:
        """Return the living processes that carry this instance's token or work in its folder."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                ours = self.token.encode() in (entry / "environ").read_bytes()
                dead = b") Z " in (entry / "stat").read_bytes()
                if entry.name.isdigit() and not dead and (ours or str(self.folder) in os.readlink(entry / "cwd")):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        while living := self.living():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):  # A keeper may have ended with its trainer.
                    os.kill(pid, signal.SIGKILL)


def alter_agent(folder: Path, old: str, new: str) -> None:
    """Replace a text in the sources of the agent in a folder; exactly one file must contain it."""
    path, altered = folder / "agent.pyz", 0
    with zipfile.ZipFile(path) as zipped:
        sources = {name: zipped.read(name).decode() for name in zipped.namelist()}
    with zipfile.ZipFile(path, "w") as zipped:
        for name, text in sources.items():
            altered += old in text
            zipped.writestr(name, text.replace(old, new))
    assert altered == 1


def kill(pid: int) -> None:
    """Kill a process by SIGKILL, and wait until it is dead."""
    os.kill(pid, signal.SIGKILL)
    while subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True).stdout.strip()[:1] not in (
        b"",
        b"Z",
    ):
        time.sleep(0.01)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path / "box")
    yield box
    box.close()


class Place:
    """A box behind an sshd, with the keys of a run; `close` closes everything that was opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "box"
        self.home = folder
        self.keys = make_keys(folder / "keys")
        self.client = folder / "keys" / "client"
        self._closing: list[Any] = []
        self.server = self.serve()

    def serve(self, *options: str, login: str = "", host_keys: tuple[Path, ...] = ()) -> sshd.Sshd:
        """Start another sshd; `login` stands before the client's key in authorized_keys."""
        line = f"{login} {self.keys.client_public}".strip()
        folder = self.home / f"sshd-{len(self._closing)}"
        hosts = host_keys or (self.home / "keys" / "host",)
        return self._kept(sshd.Sshd(folder, host_keys=hosts, authorized_keys=[line], options=options))

    def proxy(self, **how: float) -> Proxy:
        return self._kept(Proxy(self.server.port, **how))

    def machine(self, port: int | None = None, **changes: Any) -> RemoteMachine:
        address = Address(kind="ssh", host="127.0.0.1", port=port or self.server.port, user=self.server.user)
        settings = {
            "client_key": self.client,
            "host_key": self.keys.host_public,
            "folder": str(self.folder),
            "clock": SystemClock(),
        }
        return self._kept(RemoteMachine(address, **{**settings, **changes}))

    def close(self) -> None:
        for one in reversed(self._closing):
            one.close()

    def _kept(self, one: Any) -> Any:
        self._closing.append(one)
        return one


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()
