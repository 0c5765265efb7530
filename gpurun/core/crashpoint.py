"""Crash points: named places in the code at which a test can make the process kill itself. They cost nothing otherwise.

There is a crash point before and after every journal record and every call that leaves the process. With
`GPURUN_CRASH_AT=7` the process sends itself SIGKILL at the seventh crash point. With a sequence of names, such as
`GPURUN_CRASH_AT="after train.started > before far.poll > before far.poll"`, it does so once it has passed all of them
in this order; other crash points may lie between. `GPURUN_CRASH_LOG=FILE` appends number and name of each crash point
to a file, so that a test can count them.
"""

from __future__ import annotations

import os
import signal

_passed: list[str] = []


def crashpoint(name: str) -> None:
    """Record that a crash point is passed, and kill this process if the environment names it."""
    crash_at, log = os.environ.get("GPURUN_CRASH_AT"), os.environ.get("GPURUN_CRASH_LOG")
    if crash_at is None and log is None:
        return
    _passed.append(name)
    if log is not None:
        with open(log, "a", encoding="utf-8") as out:
            out.write(f"{len(_passed)} {name}\n")
    if crash_at is not None and _is_reached(crash_at):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_reached(crash_at: str) -> bool:
    if crash_at.isdecimal():
        return len(_passed) == int(crash_at)
    passed = iter(_passed)
    return all(place in passed for place in crash_at.split(" > "))
