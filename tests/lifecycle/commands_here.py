"""Helpers shared by test_commands_here.py and other tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.paths import Home
from gpurun.ledger.run_lock import holder_of
from gpurun.providers.local import LocalProvider


class Person:
    """A user who works in a folder of scripts and types gpurun commands there."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.folder, self.house = home, folder, folder.with_name("house")
        for place in (folder, self.house / "tmp"):
            place.mkdir(parents=True)

    def types(self, *words: str, timeout_s: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpurun.cli.app", *words]
        return subprocess.run(
            command, cwd=self.folder, env={**os.environ, **self.places, **more}, capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def places(self) -> dict[str, str]:
        """Return a HOME and a TMPDIR that no other process writes to."""
        return {"HOME": str(self.house), "TMPDIR": str(self.house / "tmp")}

    def runs(self, *words: str, name: str = "fox-41", **more: str) -> subprocess.CompletedProcess[str]:
        return self.types("run", "--provider", "local", "--name", name, "--json", *words, **more)

    def kinds(self, name: str = "fox-41") -> list[str]:
        events = (self.home / "runs" / name / "events.jsonl").read_text().splitlines()
        return [json.loads(line)["kind"] for line in events]

    def brought(self, name: str = "fox-41") -> dict[str, str]:
        artifacts = self.home / "runs" / name / "artifacts" / "outputs"
        return {
            path.relative_to(artifacts).as_posix(): path.read_text() for path in artifacts.rglob("*") if path.is_file()
        }

    def receipt(self, name: str = "fox-41") -> Any:
        return json.loads(self.types("receipt", name, "--json").stdout)["data"]["statement"]["predicate"]

    def holds(self) -> bool:
        """Return whether the audit finds no problem and no machine of the home is left."""
        audit = json.loads(self.types("audit", "--json").stdout.splitlines()[-1])
        return bool(audit["ok"]) and LocalProvider(Home(self.home), SystemClock()).find(None) == []


SMALL = ("--set", "train.steps=12", "--set", "train.checkpoint_every=6", "--set", "eval.every=3")
"""Settings that shorten a recipe to 12 steps, in which it still evaluates and saves checkpoints."""


def kill_supervisor(home: Path) -> None:
    """Kill every supervisor of a home, as a broken laptop would, and wait until no run of the home is locked."""
    found = subprocess.run(["pgrep", "-f", f"gpurun.lifecycle.supervisor {home}"], capture_output=True, text=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    for _ in ticks(SystemClock(), 0.05, 60):
        if not any(holder_of(folder) for folder in (home / "runs").glob("*/run.lock")):
            return
    raise AssertionError("it still runs")
