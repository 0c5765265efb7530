"""Tests that paramiko still has the private and undocumented names that gpurun uses, which a release may drop."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.packet import Packetizer

from gpurun.remote.ssh import connection, transport

PRIVATE = {
    "Channel._feed": ["self", "m"],
    "Channel._feed_extended": ["self", "m"],
    "Channel._check_add_window": ["self", "n"],
    "Transport._send_user_message": ["self", "data"],
    "Transport._send_message": ["self", "data"],
    "Transport._parse_newkeys": ["self", "m"],
    "Transport._really_parse_kex_init": ["self", "m", "ignore_first_byte"],
}
UNDOCUMENTED = {
    "Packetizer.read_all": ["self", "n", "check_rekey"],
    "Packetizer.set_keepalive": ["self", "interval", "callback"],
    "Packetizer.complete_handshake": ["self"],
}
OWNERS = {"Channel": paramiko.Channel, "Transport": paramiko.Transport, "Packetizer": Packetizer}


def taken(name: str) -> Callable[..., Any]:
    owner, _, attribute = name.partition(".")
    found: Callable[..., Any] = getattr(OWNERS[owner], attribute)
    return found


@pytest.mark.parametrize("name", [*PRIVATE, *UNDOCUMENTED])
def test_what_is_called_is_there_and_takes_what_it_is_given(name: str) -> None:
    assert list(inspect.signature(taken(name)).parameters) == {**PRIVATE, **UNDOCUMENTED}[name]


def test_the_channel_handler_table_has_both_kinds_of_data() -> None:
    table = paramiko.Transport._channel_handler_table  # type: ignore[attr-defined]
    assert table[transport.MSG_CHANNEL_DATA] is paramiko.Channel._feed  # type: ignore[attr-defined]
    assert table[transport.MSG_CHANNEL_EXTENDED_DATA] is paramiko.Channel._feed_extended  # type: ignore[attr-defined]


def test_no_other_private_name_is_used() -> None:
    used = set[str]()
    for module in (connection, transport):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        used |= {name for name in re.findall(r"\.(_[a-z]\w+)", text) if any(hasattr(o, name) for o in OWNERS.values())}
    assert used == {name.partition(".")[2] for name in PRIVATE} | {"_channel_handler_table"}


def test_what_is_read_of_a_channel_and_a_transport_is_there() -> None:
    channel = paramiko.Channel(0)
    for name in ("in_buffer", "in_stderr_buffer", "in_window_size", "status_event", "exit_status", "eof_received"):
        assert hasattr(channel, name), name
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connected = paramiko.Transport(ours, packetizer_class=Packetizer)
        for name in ("packetizer", "clear_to_send", "banner_timeout", "handshake_timeout", "auth_timeout"):
            assert hasattr(connected, name), name
        connected.packetizer.close()
