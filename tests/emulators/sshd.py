"""A real sshd that runs as this user on a free port; a test puts `proxy` in front of it to emulate a bad network.

The emulator itself listens and starts `sshd -i` for each connection, as inetd would. So no port is guessed, and the
pid of every process is known.
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
# The folder that sshd requires under root; a distribution creates it when it starts its own sshd.
_PRIVILEGE_SEPARATION = Path("/run/sshd")


def missing() -> str:
    """Return why sshd cannot run here; "" if it can. As root, create the folder that sshd requires."""
    if SSHD is None:
        return "OpenSSH's server is not installed"
    if os.getuid() == 0 and not _PRIVILEGE_SEPARATION.is_dir():
        try:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            return f"sshd wants {_PRIVILEGE_SEPARATION}: {error.strerror}"
    return ""


class Sshd:
    """An SSH server that accepts this user with the given keys and logs at debug level.

    `options` are lines of sshd_config.
    """

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
        """Return how many connections the server has accepted so far."""
        return self._door.connections

    def close(self) -> None:
        """Stop listening and kill every session."""
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
    """Yield the socket of a real ssh-agent that holds these keys; the agent is killed at the end of the block."""
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
