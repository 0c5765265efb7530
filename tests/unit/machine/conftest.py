"""A box: the real agent in a folder, with trainers that are a few lines of Python, and no process left behind."""

from __future__ import annotations

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

from gpurun.machine.answers import Status
from gpurun.machine.far import FarSide
from gpurun.machine.local import LocalMachine

PYTHON = [sys.executable, "-I", "-S", "-c"]


class Box:
    """One local machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bundle").mkdir(parents=True)
        self.token = f"gr-test-{uuid4().hex[:8]}"
        self.machine = LocalMachine(folder, self.token)
        self.far = FarSide(self.machine, python=sys.executable)
        self.far.install_agent()

    def job(self, script: str, soft_s: float = 60, hard_s: float = 60, save_s: float = 5, **env: str) -> dict[str, Any]:
        """A job whose trainer is this script; it runs in `bundle`, where it may leave files."""
        if not (self.folder / "agent" / "shipped.json").exists():
            self.machine.put("agent/shipped.json", b'{"manifest_sha256": "by hand"}')
        now = time.time()
        argv = [*PYTHON, "import os, signal, subprocess, sys, time\n" + script]
        walls = {"soft_stop_wall": now + soft_s, "hard_stop_wall": now + hard_s, "save_s": save_s}
        return {"v": 1, "run": "test-1", "argv": argv, "cwd": "bundle", "env": env, **walls}

    def status(self) -> Status:
        return self.far.poll({}).status

    def until(self, true: Callable[[], Any], limit_s: float = 10.0) -> Any:
        """Wait for something to be so; fail when it does not become so."""
        end = time.monotonic() + limit_s
        while not (value := true()):
            assert time.monotonic() < end, "it did not become so"
            time.sleep(0.02)
        return value

    def until_exited(self) -> Status:
        return self.until(lambda: (s := self.status()).state == "exited" and s)

    def text(self, name: str) -> str:
        """What the trainer left in `bundle`; empty before it has."""
        path = self.folder / "bundle" / name
        return path.read_text() if path.exists() else ""

    def agent_file(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "agent" / name).read_bytes())

    def agent_argv(self, verb: str, *options: str) -> list[str]:
        return [sys.executable, "-I", "-S", "agent.pyz", verb, "--root", ".", *options]

    def alter_agent(self, old: str, new: str) -> None:
        """Make the agent here another one, by a replacement in its sources."""
        path, altered = self.folder / "agent.pyz", 0
        with zipfile.ZipFile(path) as zipped:
            sources = {name: zipped.read(name).decode() for name in zipped.namelist()}
        with zipfile.ZipFile(path, "w") as zipped:
            for name, text in sources.items():
                altered += old in text
                zipped.writestr(name, text.replace(old, new))
        assert altered == 1

    def living(self) -> list[int]:
        """The processes of this instance: all that bear its token or have the folder as their own."""
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
                os.kill(pid, signal.SIGKILL)


def kill(pid: int) -> None:
    """kill -9, and wait until it is so."""
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
