"""Adaptations of paramiko: how much is read in one call, how much is trusted, and what waits for new keys."""

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
# Several packets in one read: paramiko reads each in two pieces, and every read from the socket costs a thread switch.
_AHEAD_BYTES = 256 << 10
# Messages about a channel that begin with its number: from a wider window over data and its end to the close.
_TO_CHANNEL = MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_CLOSE


class TimedSocket(socket.socket):
    """A TCP connection that knows when data last arrived, and how much it may still receive before the login."""

    clock: Clock
    heard_mono: float
    allowance_bytes: int | None = MOST_GREETING_BYTES
    _ahead = memoryview(b"")
    _room: bytearray | None = None

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Return bytes that were read ahead, or from the socket; b"" once the limit before the login is reached."""
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
    """Packets of limited size: the server declares the length, and paramiko would accept up to 4 GB."""

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Return exactly `n` bytes from the connection."""
        if not 0 <= n <= MOST_PACKET_BYTES:
            raise paramiko.SSHException(f"it announces a packet of {n} bytes")
        return super().read_all(n, check_rekey)


def _add_limit(take: Callable[[paramiko.Channel, paramiko.Message], None]) -> Callable[..., None]:
    """Add a limit to paramiko's handler of a channel's data, which trusts the server to respect its window."""

    def bounded(channel: paramiko.Channel, message: paramiko.Message) -> None:
        take(channel, message)
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
            raise paramiko.SSHException("it sends more than it was allowed to")

    return bounded


_keep = _add_limit(paramiko.Channel._feed)  # type: ignore[attr-defined]  # It has no public name.


def _pass_on(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Pass data to its receiver as it arrives, and widen the window by as much. Without a receiver, keep the data."""
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
        transport.wire.heard_mono = transport.wire.clock.monotonic()  # No thread was reading meanwhile.
        transport.is_taking = False
    wider_bytes = channel._check_add_window(len(block))  # type: ignore[attr-defined]  # As above.
    if wider_bytes:
        wider = paramiko.Message()
        wider.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
        wider.add_int(channel.remote_chanid)
        wider.add_int(wider_bytes)
        transport._send_user_message(wider)


class Transport(paramiko.Transport):
    """A connection over which programs may end at any moment, also while its keys are renewed.

    paramiko's thread replies at once when a program ends. While keys are renewed nothing may be sent, so that thread
    would wait for the new keys, which only it can receive, and give up the connection after 30 s (paramiko's issue
    822). Here such replies are held back until the new keys have arrived.

    Another thread's message about a program may come after that reply, which closes the program's channel. A server
    ends the whole connection if it gets a message for a closed channel. Here nothing is sent after a close.

    If a channel has an attribute `take`, its data is passed to that by this thread, because keeping it for another
    thread would double its cost. `is_taking` is True meanwhile.

    `offered` has the server's lists of algorithms, so that an error can show them.
    """

    _channel_handler_table: ClassVar = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # It has no public name.
        MSG_CHANNEL_DATA: _pass_on,
        MSG_CHANNEL_EXTENDED_DATA: _add_limit(paramiko.Channel._feed_extended),  # type: ignore[attr-defined]  # As above.
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
        """Send a message, but drop one for a channel that this side has closed.

        A new program may get the number of a closed channel. Its first request makes the number valid again.
        """
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
        if not ignore_first_byte:  # Otherwise the list is our own.
            self.offered = parsed
        return parsed

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)  # type: ignore[misc]  # As above.
        held_back, self._held_back = self._held_back, []
        for data in held_back:
            super()._send_user_message(data)  # type: ignore[misc]  # As above.
