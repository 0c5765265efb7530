"""A real sshd for this user, on a port of its own, and a TCP proxy in front of it that cuts, stalls and loses bytes.

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
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
# What an sshd of root insists on; a distribution makes it when its own sshd starts.
_PRIVILEGE_SEPARATION = Path("/run/sshd")


def missing() -> str:
    """Why no sshd can be run here; empty when one can."""
    if SSHD is None:
        return "OpenSSH's server is not installed"
    if os.getuid() == 0 and not _PRIVILEGE_SEPARATION.is_dir():
        try:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            return f"sshd wants {_PRIVILEGE_SEPARATION}: {error.strerror}"
    return ""


class Door:
    """A listening socket on a free port, with a thread that hands over whoever comes."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._take = take
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take nobody in any more; who is in stays."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._take(connection)


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
        """How many there were so far."""
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


class Proxy:
    """Passes bytes on both ways, until it is told otherwise."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flowing = threading.Event()
        self._flowing.set()
        self._ends: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._losing = False
        self._door = Door(self._pass_on)
        self.port = self._door.port

    @property
    def connections(self) -> int:
        """How many there were so far."""
        return self._door.connections

    def stall(self) -> None:
        """Pass nothing on any more, and keep every connection open."""
        self._flowing.clear()

    def flow(self) -> None:
        """Pass everything on again."""
        self._flowing.set()

    def lose(self) -> None:
        """Take every byte from now on, and pass none of them on."""
        self._losing = True

    def cut(self) -> None:
        """End every connection of now."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()
        self.cut()
        self.flow()
        for pump in self._pumps:
            pump.join()
        for end in self._ends:
            end.close()

    def _pass_on(self, near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", self._target))
        self._ends += [near, far]
        for ends in ((near, far), (far, near)):
            self._pumps.append(threading.Thread(target=self._pump, args=ends, daemon=True))
            self._pumps[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while block := source.recv(1 << 16):
                self._flowing.wait()
                if not self._losing:
                    target.sendall(block)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
