"""Finds free ports on the loopback of this computer."""

from __future__ import annotations

import errno
import socket

from gpurun.core.errors import SetupError

LOCALHOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """Return whether this process can listen on a port of the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_port(first: int) -> int:
    """Return the first free loopback port from `first` on; SetupError if there is none."""
    found = next((port for port in range(max(first, 1024), 65536) if is_free(port)), None)
    if found is None:
        raise SetupError("forward.no_port", "No port of this computer is free.", hint="Close a program that uses one.")
    return found
