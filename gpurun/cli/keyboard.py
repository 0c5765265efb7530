"""Reads keys during a live view without showing them on the screen."""

from __future__ import annotations

import os
import select
import sys
import termios
from contextlib import suppress
from typing import Any


class Keyboard:
    """Reads the keyboard from `open` to `close`; if the process has no terminal, it reads nothing.

    Ctrl-C and Ctrl-Z keep their meaning.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether keys are read."""
        return self._before is not None

    def open(self) -> None:
        """Turn off echo and line editing; do nothing in the background, where that would stop this process."""
        with suppress(OSError, ValueError, termios.error):
            keys = sys.stdin.fileno()
            if not os.isatty(keys) or os.tcgetpgrp(keys) != os.getpgrp():
                return
            before = termios.tcgetattr(keys)
            quiet = [*before]
            quiet[3] = before[3] & ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(keys, termios.TCSANOW, quiet)
            self._before = before

    def pressed(self) -> str:
        """Return the keys since the last call, without waiting."""
        if self._before is None:
            return ""
        typed = b""
        with suppress(OSError, ValueError):
            keys = sys.stdin.fileno()
            # Not poll: on macOS it reports a terminal as readable, and the read then blocks.
            while select.select([keys], [], [], 0)[0] and (more := os.read(keys, 64)):
                typed += more
        return typed.decode("ascii", "replace")

    def close(self) -> None:
        """Restore the terminal, and discard unread keys, so that the shell does not get them."""
        before, self._before = self._before, None
        if before is not None:
            with suppress(OSError, ValueError, termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, before)
