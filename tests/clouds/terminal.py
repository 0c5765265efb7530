"""A user's terminal in which a gpurun command runs."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time

from tests.clouds.rented import User


class Terminal:
    """A pseudo-terminal in which one gpurun command runs and a test types."""

    def __init__(self, user: User, *words: str, **more: str) -> None:
        self.ours, theirs = os.openpty()
        self.resize(30, 101)
        self.before = termios.tcgetattr(theirs)
        self.theirs, self.seen = theirs, ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpurun.cli.app", *words], env={**user.environment(), "TERM": "xterm", **more},
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def types(self, line: str) -> None:
        os.write(self.ours, line.encode() + b"\r")

    def shows(self, text: str, limit_s: float = 30.0) -> str:
        """Wait until the terminal shows `text`; return what came before it, and forget both."""
        end = time.monotonic() + limit_s
        while text not in self.seen:
            assert select.select([self.ours], [], [], max(0.0, end - time.monotonic()))[0], self.seen
            self.seen += os.read(self.ours, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)
