"""Checks of which kind of guest this computer can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_SYSTEM_FOLDERS = ":/usr/local/sbin:/usr/sbin:/sbin"
_TOOLS = ("ssh-keygen", "setsid", "awk")


def sshd() -> str:
    """Return the absolute path of sshd, with which it must be started; "" if it is not installed."""
    return shutil.which("sshd", path=os.environ.get("PATH", os.defpath) + _SYSTEM_FOLDERS) or ""


@cache
def missing() -> str:
    """Return why no guest can be booted here, as a reason to skip a test; "" if one can."""
    if sys.platform != "linux":
        return "emulated machines need Linux"
    if not sshd():
        return "sshd is not installed (apt-get install openssh-server)"
    absent = [tool for tool in _TOOLS if not shutil.which(tool)]
    return f"not installed: {', '.join(absent)}" if absent else ""


@cache
def whole() -> str:
    """Return why a guest here is only a group of processes and not a whole machine; "" if it is a machine."""
    if missing():
        return missing()
    if os.geteuid() != 0:
        return "only root can make namespaces for a whole machine"
    command = [sys.executable, "-m", "tests.emulators.guests.room", "--try"]
    tried = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    last_line = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"this machine lets nobody make namespaces: {last_line}" if tried.returncode else ""
