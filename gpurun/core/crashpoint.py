"""Named places at which a test may kill the process; free in production.

A crash point stands before and after every journal record and every call that leaves the process. The environment may
ask the process to kill itself with SIGKILL: `GPURUN_CRASH_AT=7` at the seventh that it passes; a path of names, as in
`GPURUN_CRASH_AT="after train.started > before far.poll > before far.poll"`, at the end of that path, each name passed
after the one before it. With `GPURUN_CRASH_LOG=FILE` each name is appended to a file, so that a test can count them.
"""

from __future__ import annotations

import os
import signal

_passed: list[str] = []


def crashpoint(name: str) -> None:
    """Pass a crash point, or die at it if the environment asks for that."""
    crash_at, log = os.environ.get("GPURUN_CRASH_AT"), os.environ.get("GPURUN_CRASH_LOG")
    if crash_at is None and log is None:
        return
    _passed.append(name)
    if log is not None:
        with open(log, "a", encoding="utf-8") as out:
            out.write(f"{len(_passed)} {name}\n")
    if crash_at is not None and _reached(crash_at):
        os.kill(os.getpid(), signal.SIGKILL)


def _reached(crash_at: str) -> bool:
    if crash_at.isdecimal():
        return len(_passed) == int(crash_at)
    passed = iter(_passed)
    return all(place in passed for place in crash_at.split(" > "))
