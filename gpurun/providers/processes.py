"""Finds and kills the processes of a local instance by a mark in their environment, which child processes inherit.

A process group would not be enough, because torchrun puts each worker into its own session. This module uses only the
standard library, because the guard imports it, too.
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

# For macOS, which has no /proc. -E shows the environment; each column needs its own -o.
_PS = ["ps", "-axEww", "-o", "pid=", "-o", "command="]


class UnreadableMarks(Exception):
    """The environment of processes cannot be read here, so the instance's processes cannot be found."""


def processes_of(token: str) -> list[int]:
    """Return the ids of the other living processes that carry the token; UnreadableMarks if marks cannot be read."""
    mark = f"{MARK}={token}".encode()
    if (PROC / "self" / "environ").exists():
        return [pid for pid in map(int, filter(str.isdigit, os.listdir(PROC))) if _has_mark(PROC / str(pid), mark)]
    require_readable_marks()
    return [pid for pid in _list_marked(mark) if pid != os.getpid()]


@cache
def require_readable_marks() -> None:
    """Check that marks can be read, by listing a marked child process; UnreadableMarks if they cannot."""
    if (PROC / "self" / "environ").exists():
        return
    token = f"probe-{os.getpid()}"
    probe = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], env=child_environment({MARK: token}),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        if probe.pid not in _list_marked(f"{MARK}={token}".encode()):
            raise UnreadableMarks(f"`{' '.join(_PS)}` does not show the environment of this user's own processes")
    finally:
        probe.kill()
        probe.communicate()


def _list_marked(mark: bytes) -> list[int]:
    """Return the ids of the processes that have the mark in the output of ps."""
    try:
        listing = subprocess.run(_PS, env=child_environment(), capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnreadableMarks(f"ps does not list the processes: {error}") from error
    lines = (line.split(None, 1) for line in listing.splitlines() if mark in line.split())
    return [int(line[0]) for line in lines]


def _has_mark(process: Path, mark: bytes) -> bool:
    """Return whether a living process (a zombie is not one) has the mark in its environment."""
    if process.name == str(os.getpid()):
        return False
    try:
        environment = (process / "environ").read_bytes()
        return mark in environment.split(b"\0") and b") Z " not in (process / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # The process has ended, or belongs to another user and so not to the instance.
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
