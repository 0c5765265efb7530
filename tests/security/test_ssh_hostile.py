"""Tests that a call to a hostile SSH server ends in time, as a lost machine, and that its bytes reach no terminal."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest
from paramiko.common import cMSG_CHANNEL_DATA

from gpurun.core.clock import SystemClock
from gpurun.core.records import Address
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.key_pairs import make_keys
from gpurun.remote.ssh import HostKeyMismatch, RemoteMachine, connection, program, scan_host_key, ssh_machine, transport
from tests.emulators.sshd import Door
from tests.memory import forget_own_peak, own_peak_bytes
from tests.refusals import refusal

ROOT = Path(__file__).parents[2]
BANNER = b"SSH-2.0-hostile\r\n"
SHORT_S = 1.0
WINDOW_BYTES, FLOOD_BYTES = 1 << 20, 24 << 20


def packet(payload: bytes, length: int | None = None) -> bytes:
    """Return an SSH packet without encryption; `length` replaces the true length in its header."""
    padding = 8 - (len(payload) + 5) % 8 + 8
    claimed = len(payload) + padding + 1 if length is None else length
    return struct.pack(">IB", claimed, padding) + payload + bytes(padding)


def for_ever(block: bytes, pause_s: float = 0.0) -> Iterator[bytes]:
    while True:
        yield block
        time.sleep(pause_s)


# What an unknown server sends before the client can check its host key.
STRANGERS: dict[str, Callable[[], Iterator[bytes]]] = {
    "nothing at all": lambda: iter(()),
    "no byte ever": lambda: for_ever(b"", 0.05),
    "one letter at a time": lambda: for_ever(b"x", 0.05),
    "a greeting one letter at a time": lambda: for_ever(b"S", 0.05),
    "one line after the other": lambda: for_ever(b"hello\r\n", 0.01),
    "a line without end": lambda: for_ever(b"x" * 65536),
    "lines without end": lambda: for_ever(b"x\n" * 32768),
    "another protocol": lambda: iter([b"HTTP/1.1 400 Bad Request\r\n\r\n"]),
    "letters that a terminal obeys": lambda: iter([b"\x1b]0;owned\x07\x1b[2J\xff\xfe\r\n" * 100]),
    "SSH of the last century": lambda: iter([b"SSH-1.5-\x1b[2J\r\n"]),
    "a greeting and the end": lambda: iter([BANNER]),
    "a greeting and silence": lambda: then(BANNER, for_ever(b"", 0.05)),
    "a packet of four gigabytes": lambda: then(BANNER + packet(b"", 0xFFFFFFF0), for_ever(b"x" * 65536)),
    "a packet of no length": lambda: then(BANNER + packet(b"", 0), for_ever(b"\0" * 65536)),
    "a packet that is a lie": lambda: then(BANNER + packet(b"\x14", 1 << 20), for_ever(b"x" * 65536)),
    "packets to ignore, for ever": lambda: then(
        BANNER, for_ever(packet(b"\x02" + struct.pack(">I", 4) + b"idle") * 500)
    ),
    "words to be logged, for ever": lambda: then(
        BANNER, for_ever(packet(b"\x04\x01" + struct.pack(">I", 6) + b"\x1b[2J\r\n" + bytes(4)) * 500)
    ),
    "a goodbye": lambda: iter([BANNER + packet(b"\x01" + struct.pack(">II", 2, 4) + b"\x1b[2J" + bytes(4))]),
    "keys that are noise": lambda: iter([BANNER + packet(b"\x14" + os.urandom(200))]),
    "no algorithm": lambda: iter([BANNER + packet(b"\x14" + bytes(16) + bytes(40) + bytes(5))]),
    "noise": lambda: then(BANNER, iter([os.urandom(1 << 16)])),
}


def then(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


class Stranger:
    """A server that sends the same bytes to every client until the client hangs up."""

    def __init__(self, words: Callable[[], Iterator[bytes]]) -> None:
        self.heard = bytearray()
        self._words = words
        self._threads: list[threading.Thread] = []
        self._leaving = threading.Event()
        self._door = Door(self._talk_to)
        self.port = self._door.port

    def close(self) -> None:
        self._leaving.set()
        self._door.close()
        for thread in self._threads:
            thread.join()

    def _talk_to(self, guest: socket.socket) -> None:
        for target in (self._talk, self._listen):
            self._threads.append(threading.Thread(target=target, args=(guest.dup(),), daemon=True))
            self._threads[-1].start()
        guest.close()

    def _talk(self, guest: socket.socket) -> None:
        guest.settimeout(0.2)
        with suppress(OSError), guest:
            for block in self._words():
                while not self._leaving.is_set():
                    with suppress(TimeoutError):
                        guest.sendall(block)
                        break
                if self._leaving.is_set():
                    return
            guest.shutdown(socket.SHUT_WR)

    def _listen(self, guest: socket.socket) -> None:
        guest.settimeout(0.2)
        with suppress(OSError), guest:
            while not self._leaving.is_set():
                with suppress(TimeoutError):
                    block = guest.recv(65536)
                    if not block:
                        return
                    self.heard += block


def until(true: Callable[[], object], limit_s: float) -> None:
    """Wait until a condition is true, for at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


def threads_and_files() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Assert after the test that it has left no thread and no file descriptor open."""
    before = threads_and_files()
    yield
    end = time.monotonic() + 10
    while any(now > then for now, then in zip(threads_and_files(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.02)
    threads, files = threads_and_files()
    assert (threads <= before[0], files <= before[1]) == (True, True)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def far(keys: Path, port: int) -> RemoteMachine:
    address = Address(kind="ssh", host="127.0.0.1", port=port, user="root")
    host_key = (keys / "host.pub").read_text()
    return RemoteMachine(address, client_key=keys / "client", host_key=host_key, folder="run", clock=SystemClock())


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_gets_nothing_and_holds_nobody_up(
    keys: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", SHORT_S)
    forget_own_peak()
    before_bytes = own_peak_bytes()
    stranger = Stranger(STRANGERS[name])
    machine = far(keys, stranger.port)
    try:
        began = time.monotonic()
        with pytest.raises((MachineLost, HostKeyMismatch)) as lost:
            machine.call(["true"], timeout_s=60)
        with pytest.raises(MachineLost) as unreachable:
            scan_host_key("127.0.0.1", stranger.port, SystemClock(), SHORT_S)
        assert time.monotonic() - began < 10
    finally:
        machine.close()
        stranger.close()
    for error in (lost.value, unreachable.value):
        assert error.what.isprintable()
        assert len(error.what) < 500
    assert b"ssh-userauth" not in bytes(stranger.heard)
    assert own_peak_bytes() - before_bytes < 64 << 20, "it made us keep what it sent"
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["a line without end", "packets to ignore, for ever", "words to be logged, for ever"])
def test_a_flood_is_cut_off_long_before_its_time_limit(keys: Path, name: str) -> None:
    stranger = Stranger(STRANGERS[name])
    began = time.monotonic()
    try:
        with pytest.raises(MachineLost):
            far(keys, stranger.port).call(["true"], timeout_s=60)
        assert time.monotonic() - began < connection.CONNECT_S / 2
    finally:
        stranger.close()


def test_what_a_stranger_says_is_not_logged_to_the_terminal(keys: Path) -> None:
    """This holds in a program that sets up no logging, like gpurun; nor does the program wait at its exit."""
    stranger = Stranger(lambda: iter([BANNER + packet(b"\x14" + bytes(57))]))
    code = (
        "from gpurun.core.clock import SystemClock\n"
        "from gpurun.remote.interface import MachineLost\n"
        "from gpurun.remote.ssh import scan_host_key\n"
        f"try: scan_host_key('127.0.0.1', {stranger.port}, SystemClock(), 15)\n"
        "except MachineLost: print('refused')\n"
    )
    began = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=30)
    finally:
        stranger.close()
    assert (done.stdout, done.stderr) == (b"refused\n", b"")
    assert time.monotonic() - began < 10


class Host(paramiko.ServerInterface):
    """A host with the right key; the test decides how it treats a login, a channel and a program."""

    def __init__(self, act: Callable[[Host, paramiko.Channel, bytes], None] | None, log_in: int, opens: int) -> None:
        self.act, self.log_in, self.opens = act, log_in, opens
        self.leaving = threading.Event()
        self.notes: list[str] = []

    def check_auth_password(self, username: str, password: str) -> int:
        self.notes.append(password)
        return GOOD

    def check_auth_interactive(self, username: str, submethods: str) -> int:
        self.notes.append(submethods)
        return GOOD

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return self.log_in

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,password,keyboard-interactive"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return self.opens

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if self.act is None:
            return False
        threading.Thread(target=self._act, args=(channel, command), daemon=True).start()
        return True

    def _act(self, channel: paramiko.Channel, command: bytes) -> None:
        channel.get_transport().global_request("until the answer to this", wait=True)  # By then it is granted.
        with suppress(OSError, EOFError, paramiko.SSHException):
            self.act(self, channel, command)  # type: ignore[misc]


def mark_of(command: bytes) -> bytes:
    return next(word for word in command.split() if word.startswith(b"gpurun-"))


def begun(channel: paramiko.Channel, command: bytes) -> None:
    channel.sendall(mark_of(command) + b" 4000000\n")


def floods(host: Host, channel: paramiko.Channel, command: bytes, *, stderr: bool = False) -> None:
    begun(channel, command)
    while not host.leaving.is_set():
        (channel.sendall_stderr if stderr else channel.sendall)(b"\x1b[2J" * 8192)


def floods_before(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    while not host.leaving.is_set():
        channel.sendall(b"\x1b[2J" * 8192)


def trickles(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    begun(channel, command)
    while not host.leaving.wait(0.05):
        channel.sendall(b"x")


def lies_about_the_mark(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    channel.sendall(mark_of(command) + b" " + b"9" * 900_000 + b"\n")
    channel.send_exit_status(0)
    channel.close()


def has_no_end(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    begun(channel, command)
    channel.send_exit_status(0)


def has_no_exit_code(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    begun(channel, command)
    channel.sendall(b"an answer")
    channel.close()


def hangs_up(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    begun(channel, command)
    channel.sendall(b"an answer")
    channel.get_transport().close()


def exits_and_hangs_up(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    """Send half of the answer and the exit code, then hang up: the rest could still be in transit."""
    begun(channel, command)
    channel.sendall(b"half an answ")
    channel.send_exit_status(0)
    channel.get_transport().sock.shutdown(socket.SHUT_WR)


def asks_for_more(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    """Try to open channels to the client (agent, X11, forwarded ports), and assert that it refuses each."""
    begun(channel, command)
    for kind in ("auth-agent@openssh.com", "x11", "forwarded-tcpip", "session"):
        with pytest.raises(paramiko.SSHException):
            channel.get_transport().open_channel(kind, ("127.0.0.1", 1), ("127.0.0.1", 1), timeout=5)
    channel.sendall(b"refused\n")
    channel.send_exit_status(0)
    channel.close()


def sends_on(host: Host, channel: paramiko.Channel, command: bytes) -> None:
    """Send a flood that ignores the window: when the client has closed the channel, or earlier with the note "at once".

    The commands `true` and `kill` end normally.
    """
    begun(channel, command)
    if b"kill -s KILL" in command or b"true" in command:
        channel.send_exit_status(0)
        channel.close()
        return
    channel.sendall(b"x")
    until(lambda: channel.closed or "at once" in host.notes, 3.0)
    block = paramiko.Message()
    block.add_byte(cMSG_CHANNEL_DATA)
    block.add_int(channel.remote_chanid)
    block.add_string(bytes(32768))
    for _ in range(FLOOD_BYTES // 32768):
        channel.get_transport()._send_user_message(block)
    host.notes.append("all of it is sent")


Act = Callable[[Host, paramiko.Channel, bytes], None]
GOOD, BAD = paramiko.AUTH_SUCCESSFUL, paramiko.AUTH_FAILED
OPEN, SHUT = paramiko.OPEN_SUCCEEDED, paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
MOST_BYTES = 4 << 20
HOSTS: dict[str, tuple[str, str, Act | None, int, int]] = {
    "lets nobody in": ("ssh.not_let_in", "root", None, BAD, OPEN),
    "wants a password too": ("ssh.more_than_key", "root", None, paramiko.AUTH_PARTIALLY_SUCCESSFUL, OPEN),
    "opens no channel": ("machine.lost", "start", None, GOOD, SHUT),
    "runs no program": ("machine.lost", "start", None, GOOD, OPEN),
    "floods": ("machine.lost", f"{MOST_BYTES} bytes", floods, GOOD, OPEN),
    "floods on the other output": (
        "machine.lost", " bytes", lambda *three: floods(*three, stderr=True), GOOD, OPEN,
    ),
    "floods before the program": ("machine.lost", " bytes", floods_before, GOOD, OPEN),
    "trickles": ("machine.lost", " 2 s", trickles, GOOD, OPEN),
    "lies about the mark": ("ssh.no_programs", "", lies_about_the_mark, GOOD, OPEN),
    "never begins": ("ssh.no_programs", " 2 s", lambda host, channel, command: None, GOOD, OPEN),
    "has no end": ("machine.lost", " 2 s", has_no_end, GOOD, OPEN),
    "has no exit code": ("machine.lost", "answer", has_no_exit_code, GOOD, OPEN),
    "hangs up": ("machine.lost", "answer", hangs_up, GOOD, OPEN),
    "exits and hangs up": ("machine.lost", "answer", exits_and_hangs_up, GOOD, OPEN),
}  # fmt: skip


class Server:
    """A paramiko server with the run's own host key, which the owner of a hostile machine has."""

    def __init__(self, keys: Path, host: Host) -> None:
        self._key = paramiko.Ed25519Key.from_private_key_file(str(keys / "host"))
        self.host = host
        self._transports: list[paramiko.Transport] = []
        self._door = Door(self._serve)
        self.port = self._door.port

    def close(self) -> None:
        self.host.leaving.set()
        self._door.close()
        for opened in self._transports:
            opened.close()

    def _serve(self, guest: socket.socket) -> None:
        transport = paramiko.Transport(guest)
        transport.add_server_key(self._key)
        self._transports.append(transport)
        with suppress(EOFError, OSError, paramiko.SSHException):
            transport.start_server(threading.Event(), self.host)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", HOSTS)
def test_a_host_gone_bad_costs_its_time_and_no_more(
    keys: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "MOST_REPLY_BYTES", MOST_BYTES)
    monkeypatch.setattr(ssh_machine, "KILL_S", 0.3)
    code, fact, *acts = HOSTS[name]
    server = Server(keys, Host(*acts))
    machine = far(keys, server.port)
    source = (bytes(1000) for _ in range(10))
    try:
        began = time.monotonic()
        with refusal(MachineLost, code, fact) as lost:
            machine.call(["cat"], stdin=source, timeout_s=2.5)
        assert time.monotonic() - began < 8
        assert not server.host.notes
    finally:
        machine.close()
        server.close()
    assert str(lost.value).isprintable()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[paramiko.Channel]:
    """Return the list of channels that the client opens; give its streams a window of a megabyte."""
    opened: list[paramiko.Channel] = []
    channel = connection.ParamikoConnection.channel

    def noted(self: connection.ParamikoConnection, *size: int) -> paramiko.Channel | None:
        opened.append(channel(self, *size))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(connection.ParamikoConnection, "channel", noted)
    monkeypatch.setattr(program, "STREAM_WINDOW_BYTES", WINDOW_BYTES)
    return opened


@pytest.mark.usefixtures("nothing_left")
def test_a_hosts_words_after_a_refused_answer_are_not_kept(keys: Path, channels: list[paramiko.Channel]) -> None:
    server = Server(keys, host := Host(sends_on, GOOD, OPEN))
    machine = far(keys, server.port)

    def refuse(_: bytes) -> None:
        raise FarRefusal("nonsense", "this was not asked for")

    try:
        with refusal(FarRefusal, "far.nonsense", "not asked for"):
            machine.call(["cat"], sink=refuse, timeout_s=20)
        kept = machine._connection
        until(lambda: host.notes, 30.0)
        assert machine.call(["true"], timeout_s=20).exit_code == 0
        assert machine._connection is kept is not None, "it is heard of by the next call, and harmless"
        assert sum(len(channel.in_buffer) for channel in channels) < WINDOW_BYTES
    finally:
        machine.close()
        server.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_sends_faster_than_it_may_is_cut_off(keys: Path, channels: list[paramiko.Channel]) -> None:
    """The sink is slow, as a disk may be, so that bytes that it has not taken yet are kept in memory."""
    server = Server(keys, host := Host(sends_on, GOOD, OPEN))
    host.notes.append("at once")
    machine = far(keys, server.port)
    try:
        with pytest.raises(MachineLost):
            machine.call(["cat"], sink=lambda _: until(lambda: channels[0].closed, 10.0), timeout_s=20)
        assert len(channels[0].in_buffer) <= WINDOW_BYTES + transport.MOST_PACKET_BYTES
        assert "all of it is sent" not in host.notes
    finally:
        machine.close()
        server.close()


def test_a_host_that_asks_for_channels_of_its_own_gets_none(keys: Path) -> None:
    server = Server(keys, Host(asks_for_more, GOOD, OPEN))
    machine = far(keys, server.port)
    try:
        assert machine.call(["true"], timeout_s=30).stdout == b"refused\n"
    finally:
        machine.close()
        server.close()


def test_a_huge_packet_is_not_waited_for_after_login_either(keys: Path) -> None:
    """A packet's length is not encrypted, so a proxy on the way can change it."""
    raised = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        packets = transport.Packets(ours)
        for size in (-1, 1 << 31, transport.MOST_PACKET_BYTES + 1):
            with pytest.raises(paramiko.SSHException, match="packet") as error:
                packets.read_all(size)
            raised.append(error)
        theirs.sendall(b"12345678")
        assert packets.read_all(8) == b"12345678"
    assert len(raised) == 3


def test_a_server_that_sends_more_than_its_window_is_cut_off() -> None:
    """The library trusts a server to respect the window, and would keep all that it sends in memory."""
    channel = SimpleNamespace(in_buffer=b"x" * 60, in_stderr_buffer=b"x" * 40, in_window_size=100)
    take = transport._add_limit(lambda *_: None)
    take(channel, None)
    for more in ("in_buffer", "in_stderr_buffer"):
        over = SimpleNamespace(**{**vars(channel), more: getattr(channel, more) + b"x"})
        with pytest.raises(paramiko.SSHException, match="more than"):
            take(over, None)
