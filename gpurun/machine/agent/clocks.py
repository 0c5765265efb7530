"""The two clocks that a lease is held against: one that settings can move, and one that they cannot."""

from __future__ import annotations

import time


def monotonic() -> float:
    """Seconds that no clock setting moves and that count sleep where the kernel can."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """A name for this boot, outside which monotonic stamps mean nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
