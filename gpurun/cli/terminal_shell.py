"""Runs a remote program at this terminal over gpurun's own SSH connection, for use if OpenSSH is not installed."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from gpurun.core.clock import Clock
from gpurun.remote.interface import MachineLost
from gpurun.remote.ssh.entry import HostEntry
from gpurun.remote.ssh.host_key import ExpectedKey, Jump

CONNECT_S = 30.0
_BLOCK = 32 << 10


class _Channel(Protocol):
    """An SSH channel, with the methods that send to the program at its other end."""

    def sendall(self, s: bytes) -> object: ...

    def resize_pty(self, width: int, height: int) -> None: ...

    def shutdown_write(self) -> None: ...


def run_here(entry: HostEntry, command: str, clock: Clock, *, at_terminal: bool) -> int:
    """Run a command line on a machine with this process's input and outputs, and return its exit code.

    At a terminal, the program gets a remote terminal that follows the size of this one.
    """
    from gpurun.remote.ssh.connection import connect

    jump = Jump(entry.jump.address, ExpectedKey.parse(entry.jump.host_key)) if entry.jump else None
    expected = ExpectedKey.parse(entry.host_key)
    connection = connect(entry.address, entry.identity, expected, clock, CONNECT_S, jump)
    try:
        channel = connection.channel()
        if channel is None:
            raise MachineLost(f"{entry.address.place} accepts no more programs on one connection.")
        if at_terminal:
            size = os.get_terminal_size(sys.stdin.fileno())
            channel.get_pty(os.environ.get("TERM", "vt100"), size.columns, size.lines)
        channel.exec_command(command)
        with _raw_terminal() if at_terminal else _unchanged_terminal(), _watch_terminal_size() as changed:
            threading.Thread(target=_send, args=(channel, changed), daemon=True).start()
            errors = threading.Thread(target=_copy_output, args=(channel.recv_stderr, sys.stderr.fileno()), daemon=True)
            errors.start()
            _copy_output(channel.recv, sys.stdout.fileno())
            errors.join()
        channel.status_event.wait()
        if channel.exit_status < 0:
            raise MachineLost(f"The connection to {entry.address.place} has ended.")
        return int(channel.exit_status)
    finally:
        connection.close()


def _copy_output(receive: Callable[[int], bytes], to: int) -> None:
    """Copy output until it ends or its reader has closed the pipe."""
    with suppress(OSError):
        while block := receive(_BLOCK):
            while block:
                block = block[os.write(to, block) :]


def _send(channel: _Channel, changed: int) -> None:
    """Send typed keys, and each new size of the terminal."""
    keys = sys.stdin.fileno()
    watched = [keys, changed]
    with suppress(Exception):  # The channel may have ended; the receiving thread notices that.
        while True:
            ready = select.select(watched, [], [])[0]
            if changed in ready:
                os.read(changed, 64)
                size = os.get_terminal_size(keys)
                channel.resize_pty(size.columns, size.lines)
            if keys in ready:
                typed = os.read(keys, _BLOCK)
                if not typed:
                    channel.shutdown_write()
                    watched.remove(keys)
                else:
                    channel.sendall(typed)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Make the terminal deliver each key immediately, even Ctrl-C; restore it at the end."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setraw(keys, termios.TCSADRAIN)  # TCSADRAIN keeps keys that were typed before.
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextmanager
def _unchanged_terminal() -> Iterator[None]:
    yield


@contextmanager
def _watch_terminal_size() -> Iterator[int]:
    """Yield a file descriptor that becomes readable when the terminal's size changes."""
    read, write = os.pipe()
    before = signal.signal(signal.SIGWINCH, lambda *_: os.write(write, b"."))
    try:
        yield read
    finally:
        signal.signal(signal.SIGWINCH, before)
