"""Builds the arguments and environment for the system's OpenSSH with gpurun's own entries."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from gpurun.cli.local_port import LOCALHOST
from gpurun.core.secrets import child_environment
from gpurun.lifecycle.ways_in import WayIn
from gpurun.remote.ssh.entry import HostEntry, proxy_command

_PASSED_ON = ("SSH_AUTH_SOCK", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "DISPLAY", "TERM")


def program() -> str | None:
    """Return the path of the system's ssh, or None."""
    return shutil.which("ssh")


def ssh_argv(config: Path, entry: HostEntry, *options: str, command: str = "") -> list[str]:
    """Return the arguments of ssh for one entry of gpurun's configuration."""
    return ["ssh", "-F", str(config), *options, "--", entry.alias, *([command] if command else [])]


def tunnel_words(pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Return the arguments of ssh that forward ports from this computer's loopback to the machine's."""
    return ["-N", *(word for here, there in pairs for word in ("-L", f"{LOCALHOST}:{here}:{LOCALHOST}:{there}"))]


def tunnel_into_job(config: Path, way: WayIn, pairs: Iterable[tuple[int, int]], node: str) -> str:
    """Return a command that forwards ports of a job's node; it works if the node lets the job's owner log in."""
    over = ["-o", f"ProxyCommand={proxy_command(config, way.entry.alias)}"] if way.entry is not None else []
    return shlex.join(["ssh", *over, *tunnel_words(pairs), node])


def ssh_environment() -> dict[str, str]:
    """Return the environment for ssh; of the user's variables, only those of ssh-agent, its prompt and the terminal."""
    return child_environment({name: os.environ[name] for name in _PASSED_ON if name in os.environ})
