"""No journey of docs/ARCHITECTURE.md enters more files than its budget."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators import sshd
from tests.journeys.trace import ROOT

_ROW = re.compile(r"^\| `(\w+)` \|.*\| (\d+) \|$", re.MULTILINE)
BUDGETS = {name: int(most) for name, most in _ROW.findall((ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8"))}


def entered(name: str, folder: Path) -> list[str]:
    """The files of a journey, traced in a process of its own."""
    told = folder / "files.json"
    command = [sys.executable, "-m", "tests.journeys", name, str(told)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert told.exists(), done.stderr
    files: list[str] = json.loads(told.read_text())
    return files


@pytest.mark.parametrize("name", ["plan", "create", "upload", "step", "download", "receipt", "run", "close"])
def test_a_journey_enters_no_more_files_than_its_budget(name: str, tmp_path: Path) -> None:
    if name == "upload" and sshd.missing():
        pytest.skip(sshd.missing())
    files = entered(name, tmp_path)
    assert len(files) <= BUDGETS[name], files
