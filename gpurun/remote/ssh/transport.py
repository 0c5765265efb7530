"""paramiko, where it has to be bent: how much is read at once, how much is believed, and who waits for new keys."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import ClassVar, cast

import paramiko
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_REQUEST,
    MSG_CHANNEL_WINDOW_ADJUST,
    cMSG_CHANNEL_WINDOW_ADJUST,
)
from paramiko.packet import Packetizer

from gpurun.core.clock import Clock
from gpurun.remote.interface import Take

MOST_GREETING_BYTES = 1 << 20
MOST_PACKET_BYTES = 256 << 10
# Several packets at once: paramiko asks for each in two pieces, and every question to the socket costs a thread switch.
_AHEAD_BYTES = 256 << 10
# What is said within a channel begins with its number: a wider window, data, the end of data, the close.
_TO_CHANNEL = MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_CLOSE


class TimedSocket(socket.socket):
    """A TCP connection that knows when it was last heard, and how much it may still be told before the login."""

    clock: Clock
    heard_mono: float
    allowance_bytes: int | None = MOST_GREETING_BYTES
    _ahead = memoryview(b"")
    _room: bytearray | None = None

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Bytes that have come, from what was read ahead while there is some; none once there were too many."""
        if not self._ahead:
            self._room = self._room or bytearray(_AHEAD_BYTES)
            read_bytes = self.recv_into(self._room, 0, flags)
            self.heard_mono = self.clock.monotonic()
            if self.allowance_bytes is not None:
                self.allowance_bytes -= read_bytes
                if self.allowance_bytes < 0:
                    return b""
            self._ahead = memoryview(self._room)[:read_bytes]
        data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        return data


class Packets(Packetizer):
    """Packets of a sane size: their length is the far side's word, and it would be believed up to 4 GB."""

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Exactly `n` bytes of the connection."""
        if not 0 <= n <= MOST_PACKET_BYTES:
            raise paramiko.SSHException(f"it announces a packet of {n} bytes")
        return super().read_all(n, check_rekey)


def _bounded(take: Callable[[paramiko.Channel, paramiko.Message], None]) -> Callable[..., None]:
    """The library's way of taking data in for a channel, with an end: it believes that a server keeps to its window."""

    def bounded(channel: paramiko.Channel, message: paramiko.Message) -> None:
        take(channel, message)
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
            raise paramiko.SSHException("it sends more than it was allowed to")

    return bounded


_keep = _bounded(paramiko.Channel._feed)  # type: ignore[attr-defined]  # It has no public name.


def _taken(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Hand data to what takes it as it comes, and make room for as much; else keep it until it is asked for."""
    transport = cast(Transport, channel.get_transport())
    take: Take | None = getattr(channel, "take", None)
    if take is None:
        _keep(channel, message)
        return
    block = message.get_binary()
    transport.is_taking = True
    try:
        take(block)
    finally:
        transport.wire.heard_mono = transport.wire.clock.monotonic()  # Meanwhile nobody listened.
        transport.is_taking = False
    wider_bytes = channel._check_add_window(len(block))  # type: ignore[attr-defined]  # As above.
    if wider_bytes:
        wider = paramiko.Message()
        wider.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
        wider.add_int(channel.remote_chanid)
        wider.add_int(wider_bytes)
        transport._send_user_message(wider)


class Transport(paramiko.Transport):
    """A connection on which programs may end at any moment, also while its keys are changed.

    paramiko's thread answers the end of a program at once. While keys are changed nothing may be sent, so it waited for
    the new ones, which only it can take in, until it gave the connection up after 30 s (its issue 822). Here such
    answers are held back until the new keys are there.

    What another thread has to say of a program may come after that answer, which closes its channel. A server ends the
    whole connection over a channel that is none; here nothing follows a close.

    What comes on a channel that has an attribute `take` is handed to that, by this thread: to keep it for another
    thread costs as much again as the whole of its way here. `is_taking` while one of them is at it.

    `offered` is what the server has named of each kind of algorithm, so that a refusal can tell it.
    """

    _channel_handler_table: ClassVar = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # It has no public name.
        MSG_CHANNEL_DATA: _taken,
        MSG_CHANNEL_EXTENDED_DATA: _bounded(paramiko.Channel._feed_extended),  # type: ignore[attr-defined]  # As above.
    }

    def __init__(self, wire: TimedSocket) -> None:
        self.wire = wire
        self.is_taking = False
        self.offered: dict[str, list[str]] = {}
        self._held_back: list[paramiko.Message] = []
        self._ended: set[bytes] = set()
        super().__init__(wire, packetizer_class=Packets)

    def _send_user_message(self, data: paramiko.Message) -> None:
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._held_back.append(data)
        else:
            super()._send_user_message(data)  # type: ignore[misc]  # It has no public name.

    def _send_message(self, data: paramiko.Message) -> None:
        """Send it, unless its channel is closed and no program was asked for on one of that number since."""
        head = data.asbytes()[:5]
        kind, channel = head[0], head[1:]
        if kind == MSG_CHANNEL_REQUEST:
            self._ended.discard(channel)
        elif _TO_CHANNEL[0] <= kind <= _TO_CHANNEL[1] and channel in self._ended:
            return
        elif kind == MSG_CHANNEL_CLOSE:
            self._ended.add(channel)
        super()._send_message(data)  # type: ignore[misc]  # As above.

    def _really_parse_kex_init(self, m: paramiko.Message, ignore_first_byte: bool = False) -> dict[str, list[str]]:
        parsed: dict[str, list[str]] = super()._really_parse_kex_init(m, ignore_first_byte)  # type: ignore[misc]
        if not ignore_first_byte:  # Else it is our own.
            self.offered = parsed
        return parsed

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)  # type: ignore[misc]  # As above.
        held_back, self._held_back = self._held_back, []
        for data in held_back:
            super()._send_user_message(data)  # type: ignore[misc]  # As above.
