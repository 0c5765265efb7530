"""The budgets and the traced files of the journeys, for test_journeys.py and house.py."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys

from tests.journeys.__main__ import RENTAL
from tests.journeys.trace import ROOT

_ROW = re.compile(r"^\| `(\w+)` \|.*\| (\d+) \|$", re.MULTILINE)


_PAGE = (ROOT / "docs" / "dev" / "ARCHITECTURE.md").read_text(encoding="utf-8")


BUDGETS = {name: int(most) for name, most in _ROW.findall(_PAGE)}


@functools.cache
def entered(*names: str) -> dict[str, list[str]]:
    """Return the files of each journey, traced in a separate process."""
    command = [sys.executable, "-m", "tests.journeys", *names]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    files: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return files


def files_of(name: str) -> list[str]:
    return entered(*(RENTAL if name in RENTAL else (name,)))[name]
