"""Functions that find processes in /proc: those of a namespace, the descendants of a process, those with a mark."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def living() -> set[int]:
    """Return all processes that are not zombies."""
    return {pid for pid, (state, _) in _table().items() if state not in "ZX"}


def lives(pid: int, proc: Path = _PROC) -> bool:
    """Return whether a process exists, by this computer's /proc or another, and is not a zombie."""
    return _stat(pid, proc)[0] not in "ZX"


def in_namespace(mounts: str) -> list[int]:
    """Return the processes in the mount namespace with this name."""
    return [pid for pid in living() if _link(pid, "mnt") == mounts]


def apart(pid: int) -> bool:
    """Return whether a process is in another PID namespace than this process."""
    return _link(pid, "pid") not in ("", _link(os.getpid(), "pid"))


def number_inside(pid: int) -> int:
    """Return the number of a process in its own PID namespace; 0 if it has ended."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def descendants(ancestor: int) -> list[int]:
    """Return all living descendants of a process.

    A process that loses its parent during the call may be missing; where this matters, call again.
    """
    table, found = _table(), {ancestor}
    while more := {pid for pid, (_, parent) in table.items() if parent in found} - found:
        found |= more
    return sorted(pid for pid in found - {ancestor} if table[pid][0] not in "ZX")


def with_mark(mark: str) -> list[int]:
    """Return the processes whose environment has the guest's mark."""
    marked, entry = [], f"GUEST_MARK={mark}".encode()
    for pid in living():
        with suppress(OSError):
            if entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                marked.append(pid)
    return marked


def command(pid: int) -> str:
    """Return the short name of a process's program; "" if it has ended."""
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, or has ended."""
    return _stat(pid)[0] in "TtZX"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; some of them may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _table() -> dict[int, tuple[str, int]]:
    """Return the state and the parent of every process."""
    return {int(name): _stat(int(name)) for name in os.listdir(_PROC) if name.isdigit()}


def _stat(pid: int, proc: Path = _PROC) -> tuple[str, int]:
    """Return the state and the parent of a process; ("X", 0) if there is no such process."""
    try:
        state, parent = (proc / str(pid) / "stat").read_text(encoding="latin-1").rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def _link(pid: int, kind: str) -> str:
    try:
        return os.readlink(_PROC / str(pid) / "ns" / kind)
    except OSError:
        return ""
