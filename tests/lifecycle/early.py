"""Helpers shared by test_early.py and other tests."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.paths import RunFolder
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.remote.client import FarSide
from gpurun.remote.local_machine import LocalMachine


class Instance:
    """A machine with a real agent, on which the test plays the trainer by writing checkpoints."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.out = folder / "out"
        self.far = FarSide(LocalMachine(folder, "gr-test"), python=sys.executable)
        self.far.install_agent()
        self.far.manifest(0)  # The agent makes its folders when it answers this.

    def save(self, *steps: int, best: int | None = None) -> list[str]:
        """Write checkpoints and a manifest that lists only them, as the trainer does; return the files' names."""
        files: list[dict[str, Any]] = []
        (self.out / "checkpoints").mkdir(exist_ok=True)
        for step in steps:
            for kind, content in (("weights", b"w%d" % step * 50_000), ("state", b"s%d" % step)):
                name = f"checkpoints/{step:06d}.{kind}"
                (self.out / name).write_bytes(content)
                digest = hashlib.sha256(content).hexdigest()
                files.append({"name": name, "bytes": len(content), "sha256": digest, "kind": kind, "step": step})
        best_checkpoint = {"step": best, "val_loss": 2.5} if best is not None else None
        manifest = {"v": 1, "latest": max(steps), "best": best_checkpoint, "files": files}
        (self.out / "MANIFEST.json").write_text(json.dumps(manifest))
        return [str(file["name"]) for file in files]


FREE = EgressBudget(RunFolder(Path("nowhere")), None, 1)


def until(true: Callable[[], Any]) -> None:
    for _ in range(400):
        if true():
            return
        threading.Event().wait(0.025)
    pytest.fail("it did not become so")


def at_home(folder: RunFolder) -> set[str]:
    names = (path for path in folder.artifacts.rglob("*") if path.is_file() and ".partial" not in path.parts)
    return {str(path.relative_to(folder.artifacts)) for path in names}
