"""Tests that a Ctrl-C while gpurun still imports its modules is reported in the requested output format."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# An import hook that sends SIGINT when this module is imported.
PRESSED = """
import os, signal, sys
class Finger:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finger())
sys.argv = ["gpurun", *{words!r}]
from gpurun.__main__ import main
main()
"""


def interrupted_at(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = PRESSED.format(module=module, words=words)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["gpurun.cli.app", "typer", "gpurun.core.settings", "gpurun.ledger.runs"])
def test_it_is_said_in_a_sentence(module: str) -> None:
    done = interrupted_at(module, "ps")
    assert "Interrupted." in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 130


def test_or_in_an_envelope() -> None:
    done = interrupted_at("typer", "ps", "--json")
    answer = json.loads(done.stdout)
    assert (answer["command"], answer["errors"][0]["code"], answer["exit_code"]) == ("ps", "interrupted", 130)
    assert done.stderr == ""
