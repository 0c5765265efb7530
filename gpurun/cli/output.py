"""Standard output, where it can be lost: its reader has seen enough, or the disk under it is full."""

from __future__ import annotations

import os
import sys


class OutputLost(Exception):
    """Standard output takes nothing more; `why` is empty where its reader has left, which is no trouble."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.why = "" if isinstance(error, BrokenPipeError) else error.strerror or str(error)


def put(text: str) -> None:
    """Write a text and a newline at once; OutputLost where that cannot be."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise lost(error) from None


def put_bytes(content: bytes) -> int:
    """Write bytes as they are, at once, and return how many; OutputLost where that cannot be."""
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise lost(error) from None
    return len(content)


def lost(error: OSError) -> OutputLost:
    """The error for standard output's; what is still in the buffer goes nowhere, or Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputLost(error)
