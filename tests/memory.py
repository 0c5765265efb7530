"""How much memory and processor time processes have taken, for tests and measurements."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path


def own_peak_bytes() -> int:
    """This process's peak resident size: never ru_maxrss on Linux, which begins with that of its parent."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None, "this Linux does not tell the peak"
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_held_bytes = 0


def forget_own_peak() -> None:
    """Let the peak begin again from what is held now, so that what went before hides nothing (Linux only)."""
    global _held_bytes
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _held_bytes = own_peak_bytes()


def own_growth_bytes() -> int:
    """Return by how much the peak lies above what was held when it was forgotten."""
    return own_peak_bytes() - _held_bytes


def tree_bytes(pid: int, *, shared_once: bool = False) -> int:
    """What a process and all its descendants hold resident now (Linux only).

    What some share is counted for each of them, or in proportion: then it counts once where all that share are here.
    """
    name, field = ("smaps_rollup", "Pss") if shared_once else ("status", "VmRSS")
    try:
        text = Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    own = int(found[1]) * 1024 if found else 0
    return own + sum(tree_bytes(child, shared_once=shared_once) for child in _children(pid))


def tree_cpu_s(pid: int) -> float:
    """Processor time of a process, all its descendants and those of them that have ended (Linux only).

    What a forked worker takes is nobody's `ru_utime` who started the server that forked it.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    ticks = sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(tree_cpu_s, _children(pid)))


def _children(pid: int) -> list[int]:
    try:
        lines = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for line in lines for child in line.split()]
