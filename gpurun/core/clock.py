"""The only module that reads the time or sleeps.

Durations come from a clock that also counts while a laptop sleeps (CLOCK_BOOTTIME where the kernel has it). Wall
time is for people, for timestamps of providers and for absolute deadlines.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from math import ceil
from pathlib import Path
from typing import Protocol

from gpurun.core.secrets import child_environment

_LEAST_S = 1e-6  # Below the rounding error of summed seconds; a shorter sleep may not advance a clock.


class Clock(Protocol):
    """Wall-clock seconds since the epoch, monotonic seconds, and a way to wait."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


# On macOS, CLOCK_MONOTONIC also counts while the machine sleeps; time.monotonic() does not.
_COUNTS_SLEEP: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """This machine's clock."""

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never run backwards, and that count sleep where the kernel can."""
        return time.clock_gettime(_COUNTS_SLEEP)

    def sleep(self, seconds: float) -> None:
        """Wait; return at once for zero or less."""
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """A clock that advances only when `sleep` is called: for simulations and tests."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._start = start
        self._elapsed = 0.0
        self._skew = 0.0

    def wall(self) -> float:
        """Return virtual seconds since the epoch, with any jump added."""
        return self._start + self._elapsed + self._skew

    def monotonic(self) -> float:
        """Return virtual seconds since the clock was made."""
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self._elapsed += max(0.0, seconds)

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back without advancing the time."""
        self._skew += seconds


def boot_id() -> str:
    """Return a name for this boot of this machine, because monotonic timestamps compare only within one boot."""
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        return path.read_text().strip()
    except OSError:
        booted_wall = time.time() - time.clock_gettime(_COUNTS_SLEEP)
        of_a_mac = _printed("sysctl", "-n", "kern.bootsessionuuid").strip()
        return of_a_mac or f"{uuid.getnode():012x}-{int(booted_wall) // 60}"


def machine_id() -> str:
    """Return a name for this machine that survives a boot and reveals nothing else about it."""
    try:
        known = Path("/etc/machine-id").read_text().strip()
    except OSError:
        known = ""
    if not known:  # On a Mac, some versions of Python report another network card in each process.
        of_a_mac = re.search(r'"IOPlatformUUID" = "([^"]+)"', _printed("ioreg", "-rd1", "-c", "IOPlatformExpertDevice"))
        known = of_a_mac[1] if of_a_mac else f"{uuid.getnode():012x}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


@cache
def _printed(*command: str) -> str:
    """Return what a macOS program prints; "" if the program does not exist."""
    import subprocess

    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    try:
        return subprocess.run(command, env=child_environment({"PATH": path}), capture_output=True, text=True).stdout
    except OSError:
        return ""


def ticks(clock: Clock, period_s: float, limit_s: float) -> Iterator[float]:
    """Yield the elapsed seconds at once, then every period; the last tick is at the limit."""
    start = clock.monotonic()
    while True:
        elapsed = clock.monotonic() - start
        yield elapsed
        remaining = limit_s - (clock.monotonic() - start)
        if remaining < _LEAST_S:
            return
        clock.sleep(min(period_s, remaining))


def utc(wall: float) -> str:
    """Return an ISO-8601 UTC timestamp with milliseconds, as used in JSON."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local_minute(wall: float, *, now: float) -> str:
    """Return a deadline in local time for people, rounded up to the minute: at its start the deadline has passed."""
    whole = ceil(wall / 60) * 60.0
    shown = local_time(whole, now=now)
    return shown[:-3] if shown.count(":") == 2 else shown


def local_time(wall: float, *, now: float) -> str:
    """Return a local clock time for people, with the date when it is not today."""
    then, today = datetime.fromtimestamp(wall), datetime.fromtimestamp(now)
    return then.strftime("%H:%M:%S") if then.date() == today.date() else then.strftime("%Y-%m-%d %H:%M")
