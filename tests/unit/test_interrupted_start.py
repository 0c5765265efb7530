"""A Ctrl-C while the command is still being read from the disk is kept, and answered in the language asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# A finder that interrupts when a module is looked for, as a person's finger may.
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
