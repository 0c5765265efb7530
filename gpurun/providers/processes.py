"""The processes of a local instance, known by a mark in their environment, however they were started.

A process group would not do: torchrun puts each worker into a session of its own. The mark is inherited by everything
that the instance starts, so it works as a cloud's tag does. Standard library only: the guard runs from this file too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from gpurun.core.secrets import child_environment

MARK = "GPURUN_INSTANCE"
PROC = Path("/proc")

# A Mac's, where there is no /proc: -E is the environment, and a column has an -o of its own.
_PS = ["ps", "-axEww", "-o", "pid=", "-o", "command="]


class Unseen(Exception):
    """The environment of processes is not shown here, so nothing can be said about who lives."""


def processes_of(token: str) -> list[int]:
    """The ids of all living processes that carry the token, this one left out; Unseen where marks cannot be read."""
    mark = f"{MARK}={token}".encode()
    if (PROC / "self" / "environ").exists():
        return [pid for pid in map(int, filter(str.isdigit, os.listdir(PROC))) if _bears(PROC / str(pid), mark)]
    demand_sight()
    return [pid for pid in _listed(mark) if pid != os.getpid()]


@cache
def demand_sight() -> None:
    """Find a marked child of this process in the list of all; Unseen where that does not show it."""
    if (PROC / "self" / "environ").exists():
        return
    token = f"probe-{os.getpid()}"
    probe = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], env=child_environment({MARK: token}),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        if probe.pid not in _listed(f"{MARK}={token}".encode()):
            raise Unseen(f"`{' '.join(_PS)}` does not show the environment of this user's own processes")
    finally:
        probe.kill()
        probe.communicate()


def _listed(mark: bytes) -> list[int]:
    """The ids of the processes that ps shows with a mark in their environment."""
    try:
        listing = subprocess.run(_PS, env=child_environment(), capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unseen(f"ps does not list the processes: {error}") from error
    lines = (line.split(None, 1) for line in listing.splitlines() if mark in line.split())
    return [int(line[0]) for line in lines]


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


def kill_instance(token: str) -> int:
    """Send SIGKILL to every process of the instance once; return how many there were."""
    found = processes_of(token)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)
