"""Named places at which a test may kill the process; free in production.

A crash point stands before and after every journal record and every call that leaves the process. The environment can
make the process kill itself with SIGKILL. `GPURUN_CRASH_AT=7` does so at the seventh point that it passes. A path of
names such as `GPURUN_CRASH_AT="after train.started > before far.poll > before far.poll"` does so at the end of that
path, where each name must be passed after the one before it. `GPURUN_CRASH_LOG=FILE` appends each name to a file, for
counting.
"""

from __future__ import annotations

import os
import signal

_passed: list[str] = []


def crashpoint(name: str) -> None:
    """Pass a crash point, or die there if the environment requests it."""
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
