"""The memory and processor time that processes use, for tests and measurements."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path


def own_peak_bytes() -> int:
    """Return this process's peak resident size; not from ru_maxrss on Linux, which begins with the parent's peak."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None, "this Linux does not tell the peak"
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_held_bytes = 0


def forget_own_peak() -> None:
    """Restart the peak from what is held now, because an earlier peak would hide growth (Linux only)."""
    global _held_bytes
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _held_bytes = own_peak_bytes()


def own_growth_bytes() -> int:
    """Return by how many bytes the peak has grown since `forget_own_peak`."""
    return own_peak_bytes() - _held_bytes


def tree_bytes(pid: int, *, shared_once: bool = False) -> int:
    """Return the resident bytes of a process and all its descendants now (Linux only).

    A page that several processes share counts for each of them. With `shared_once` it counts in proportion, and thus
    once if all of them are in this tree.
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
    """Return the processor seconds of a process and all its descendants, also of those that have ended (Linux only).

    The `ru_utime` of a process does not contain the time of workers that a server started by it has forked.
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
