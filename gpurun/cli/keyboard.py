"""The keys that are pressed while a live view is shown, and no echo of them in the middle of the picture."""

from __future__ import annotations

import os
import select
import sys
import termios
from contextlib import suppress
from typing import Any


class Keyboard:
    """Takes the terminal's keyboard from `open` to `close`; where there is none, or it is another's, nothing is typed.

    Ctrl-C and Ctrl-Z stay what they are.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @property
    def is_open(self) -> bool:
        """Whether keys are heard."""
        return self._before is not None

    def open(self) -> None:
        """Turn off echo and line editing. In the background that would stop this process, so it is left alone there."""
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
        """The keys since the last call; it does not wait."""
        if self._before is None:
            return ""
        typed = b""
        with suppress(OSError, ValueError):
            keys = sys.stdin.fileno()
            # Not poll: a Mac's says of a terminal that it can be read, and the read then waits.
            while select.select([keys], [], [], 0)[0] and (more := os.read(keys, 64)):
                typed += more
        return typed.decode("ascii", "replace")

    def close(self) -> None:
        """Give the terminal back as it was; what was typed and not read is not the shell's."""
        before, self._before = self._before, None
        if before is not None:
            with suppress(OSError, ValueError, termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, before)
