"""A real sshd for this user, on a port of its own; `proxy` stands in front of it where the network is to be bad.

The helper listens itself and gives every connection an sshd of its own (`sshd -i`, as inetd would): no port is guessed,
and every process is known by its pid.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.emulators.proxy import Door

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
# What an sshd of root insists on; a distribution makes it when its own sshd starts.
_PRIVILEGE_SEPARATION = Path("/run/sshd")


def missing() -> str:
    """Return why no sshd can be run here; empty when one can."""
    if SSHD is None:
        return "OpenSSH's server is not installed"
    if os.getuid() == 0 and not _PRIVILEGE_SEPARATION.is_dir():
        try:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            return f"sshd wants {_PRIVILEGE_SEPARATION}: {error.strerror}"
    return ""


class Sshd:
    """Lets this user in with the given keys, and writes down all that happens; `options` are lines of sshd_config."""

    def __init__(
        self, folder: Path, *, host_keys: Sequence[Path], authorized_keys: Sequence[str], options: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.log_file = folder / "sshd.log"
        self.log_file.touch()
        authorized = folder / "authorized_keys"
        authorized.write_text("".join(f"{line.strip()}\n" for line in authorized_keys))
        self._config = folder / "sshd_config"
        lines = [
            *options,
            *(f"HostKey {path}" for path in host_keys),
            f"AuthorizedKeysFile {authorized}",
            "StrictModes no",
            "UsePAM no",
            "UseDNS no",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "LogLevel DEBUG2",
        ]
        self._config.write_text("\n".join(lines) + "\n")
        self._servers: list[subprocess.Popen[bytes]] = []
        self._door = Door(self._serve)
        self.port = self._door.port

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def connections(self) -> int:
        """Return how many there were so far."""
        return self._door.connections

    def close(self) -> None:
        """Stop listening, and end every session."""
        self._door.close()
        for server in self._servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def _serve(self, connection: socket.socket) -> None:
        argv = [str(SSHD), "-i", "-f", str(self._config), "-E", str(self.log_file)]
        quiet = {"stderr": subprocess.DEVNULL, "start_new_session": True}
        with connection:
            self._servers.append(subprocess.Popen(argv, stdin=connection, stdout=connection, **quiet))


@contextmanager
def key_agent(folder: Path, *keys: Path) -> Iterator[Path]:
    """Yield the socket of a real ssh-agent that holds these keys and ends with the block."""
    at = folder / "agent.sock"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", at], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not at.exists():
            assert agent.poll() is None, "it did not start"
            time.sleep(0.01)
        for key in keys:
            subprocess.run(["ssh-add", "-q", key], env={**os.environ, "SSH_AUTH_SOCK": str(at)}, check=True)
        yield at
    finally:
        agent.kill()
        agent.wait()
