"""Named places at which a test may kill the process; free in production.

A crash point stands before and after every journal record and every call that leaves the process. With
`GPURUN_CRASH_AT=7` in the environment the process kills itself with SIGKILL at the seventh; with
`GPURUN_CRASH_LOG=FILE` each name is appended to a file, so that a test can count them.
"""

from __future__ import annotations

import os
import signal

_passed = 0


def crashpoint(name: str) -> None:
    """Pass a crash point, or die at it if the environment asks for that."""
    crash_at, log = os.environ.get("GPURUN_CRASH_AT"), os.environ.get("GPURUN_CRASH_LOG")
    if crash_at is None and log is None:
        return
    global _passed
    _passed += 1
    if log is not None:
        with open(log, "a", encoding="utf-8") as out:
            out.write(f"{_passed} {name}\n")
    if crash_at is not None and int(crash_at) == _passed:
        os.kill(os.getpid(), signal.SIGKILL)
