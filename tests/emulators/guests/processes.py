"""Finds processes in /proc: those of a namespace, the descendants of a process, those with a mark."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def living() -> set[int]:
    """All processes that are no zombies."""
    return {pid for pid, (state, _) in _table().items() if state not in "ZX"}


def lives(pid: int, proc: Path = _PROC) -> bool:
    """Whether a process exists, by this machine's /proc or another's, and is no zombie."""
    return _stat(pid, proc)[0] not in "ZX"


def in_namespace(mounts: str) -> list[int]:
    """The processes that see these mounts, by the name of their mount namespace."""
    return [pid for pid in living() if _link(pid, "mnt") == mounts]


def apart(pid: int) -> bool:
    """Return whether a process is in another process namespace than this one."""
    return _link(pid, "pid") not in ("", _link(os.getpid(), "pid"))


def number_inside(pid: int) -> int:
    """The number that a process has in its own namespace; 0 if it has ended."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def descendants(ancestor: int) -> list[int]:
    """The living children of a process, and theirs, and so on.

    One that loses its parent while the list is made may be missing: where that matters, ask again.
    """
    table, found = _table(), {ancestor}
    while more := {pid for pid, (_, parent) in table.items() if parent in found} - found:
        found |= more
    return sorted(pid for pid in found - {ancestor} if table[pid][0] not in "ZX")


def with_mark(mark: str) -> list[int]:
    """The processes whose environment has the guest's mark."""
    marked, entry = [], f"GUEST_MARK={mark}".encode()
    for pid in living():
        with suppress(OSError):
            if entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                marked.append(pid)
    return marked


def command(pid: int) -> str:
    """The short name of a process's program; empty if it has ended."""
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP, or has ended."""
    return _stat(pid)[0] in "TtZX"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal processes, of which some may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _table() -> dict[int, tuple[str, int]]:
    """The state and the parent of every process."""
    return {int(name): _stat(int(name)) for name in os.listdir(_PROC) if name.isdigit()}


def _stat(pid: int, proc: Path = _PROC) -> tuple[str, int]:
    """A process's state and its parent; that of a dead one if there is none."""
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
