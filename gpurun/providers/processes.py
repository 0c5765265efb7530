"""The processes of a local instance, known by a mark in their environment, however they were started.

A process group would not do: torchrun puts each worker into a session of its own. The mark is inherited by everything
that the instance starts, so it works as a cloud's tag does. Standard library only: the guard runs from this file too.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from gpurun.core.secrets import child_environment

MARK = "GPURUN_INSTANCE"


def processes_of(token: str) -> list[int]:
    """The ids of all living processes that carry the token, this one left out."""
    mark = f"{MARK}={token}".encode()
    proc = Path("/proc")
    if (proc / "self" / "environ").exists():
        return [pid for pid in map(int, filter(str.isdigit, os.listdir(proc))) if _bears(proc / str(pid), mark)]
    command = ["ps", "axeww", "-o", "pid=,command="]
    listing = subprocess.run(command, env=child_environment(), capture_output=True, check=True).stdout
    lines = (line.split(None, 1) for line in listing.splitlines() if mark in line.split())
    return [int(line[0]) for line in lines if int(line[0]) != os.getpid()]


def _bears(process: Path, mark: bytes) -> bool:
    """Whether a living process (a zombie is not one) has the mark in its environment."""
    if process.name == str(os.getpid()):
        return False
    try:
        environment = (process / "environ").read_bytes()
        return mark in environment.split(b"\0") and b") Z " not in (process / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # It ended while we looked, or it is another user's and so not ours.
        return False


def kill_all(token: str) -> int:
    """Send SIGKILL to every process of the instance once; return how many there were."""
    found = processes_of(token)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)
