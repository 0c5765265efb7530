"""How much memory this process has held at most, for tests and measurements."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def own_peak_bytes() -> int:
    """This process's peak resident size: never ru_maxrss on Linux, which begins with that of whoever started it."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None, "this Linux does not tell the peak"
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_own_peak() -> None:
    """Let the peak begin anew from what is held now, so that what went before hides nothing (Linux only)."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
