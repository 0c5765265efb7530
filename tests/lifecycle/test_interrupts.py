"""Tests of Ctrl-C on a real terminal: its effect depends on the run's phase, and the terminal always shows it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle.supervisor import start_supervisor
from gpurun.providers.local import LocalProvider

LONG = ["train", "mini-gpt", "--provider", "local", "--name", "fox-41", "--set", "steps=100000"]


class Terminal:
    """A gpurun command on a pseudo-terminal with 100 columns and 40 lines."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "LINES": "40", "LANG": "C.UTF-8"}
            os.execve(sys.executable, [sys.executable, "-m", "gpurun.cli.app", *arguments], environment)
        self.shown = ""

    def until(self, words: str, limit_s: float = 60) -> None:
        """Read until the command has shown the words."""
        end = time.monotonic() + limit_s
        while words not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown):
            assert time.monotonic() < end, f"{words!r} was never shown: {self.shown[-800:]}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.shown += os.read(self.fd, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def code(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        try:
            while os.read(self.fd, 65536):
                continue
        except OSError:
            pass  # The other side of the terminal is closed: the command has ended.
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def nothing_is_left(home: Path) -> bool:
    return LocalProvider(Home(home), SystemClock()).find(None) == []


@pytest.mark.slow
def test_in_training_it_asks_detach_leaves_it_and_stop_ends_it(own_home: Path) -> None:
    first = Terminal(*LONG)
    first.until("step 0050")
    first.type("\x03")
    first.until("[d]etach  [s]top")
    first.type("d\n")
    assert first.code() == 8
    assert not nothing_is_left(own_home)
    again = Terminal("attach", "fox-41")
    again.until("RUNNING")
    again.type("\x03")
    again.until("[d]etach  [s]top")
    again.type("s\n")
    again.until("Receipt fox-41")
    assert again.code() == 130
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_a_question_mark_explains_and_q_leaves_it_running(own_home: Path) -> None:
    first = Terminal(*LONG)
    first.until("step 0010")
    first.type("?")
    first.until("hide this")
    first.type("q")
    first.until("gpurun attach fox-41")
    assert first.code() == 8
    ended = Terminal("destroy", "fox-41", "--yes")
    assert ended.code() == 0
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_before_training_nothing_is_lost_and_it_is_destroyed(own_home: Path) -> None:
    terminal = Terminal(*LONG)
    terminal.until("provision ●")
    terminal.type("\x03")
    terminal.until("Receipt fox-41")
    assert terminal.code() == 130
    assert nothing_is_left(own_home)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_while_the_supervisor_starts_it_is_destroyed_too(
    number: int, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*given: Any) -> None:
        os.kill(os.getpid(), number)
        start_supervisor(*given)

    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", start)
    monkeypatch.setattr(sys, "argv", ["gpurun", *LONG, "--yes"])
    assert run_app(build_app()) == 128 + number
    run = look_at_run(Home(own_home), "fox-41")
    assert run.owner is None
    assert not run.unfinished
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_a_closed_terminal_detaches(own_home: Path) -> None:
    terminal = Terminal(*LONG)
    terminal.until("step 0010")
    os.kill(terminal.pid, signal.SIGHUP)
    assert terminal.code() == 8
    assert not nothing_is_left(own_home)
    ended = Terminal("destroy", "fox-41", "--yes")
    assert ended.code() == 0
    assert nothing_is_left(own_home)
