"""The system's OpenSSH with gpurun's own entries: the words it is called with, and what it may know."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpurun.core.secrets import child_environment
from gpurun.remote.ssh.entry import HostEntry

_PASSED_ON = ("SSH_AUTH_SOCK", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "DISPLAY", "TERM")


def program() -> str | None:
    """Return the system's ssh, None where there is none."""
    return shutil.which("ssh")


def ssh_argv(config: Path, entry: HostEntry, *options: str, command: str = "") -> list[str]:
    """Return ssh's words for one entry of a configuration, and of no other; the name stands behind `--`."""
    return ["ssh", "-F", str(config), *options, "--", entry.alias, *([command] if command else [])]


def ssh_environment() -> dict[str, str]:
    """Return what an ssh may know: where the agent is, and the terminal."""
    return child_environment({name: os.environ[name] for name in _PASSED_ON if name in os.environ})
