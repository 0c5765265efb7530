"""One SSH connection to the host with the expected key. Only this module and `transport` use paramiko.

Whatever the server sends, every step has a time limit. `transport` limits how much of it is read and trusted.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from weakref import WeakSet

import paramiko
from paramiko.common import cMSG_GLOBAL_REQUEST
from paramiko.ssh_exception import IncompatiblePeer

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError
from gpurun.core.records import Address
from gpurun.core.untrusted import error_words, last_words
from gpurun.remote.interface import MOST_REPLY_BYTES, MachineLost, Take
from gpurun.remote.key_pairs import AGENT, fingerprint, private_key, public_part
from gpurun.remote.ssh.host_key import ExpectedKey, HostKeyMismatch, Jump
from gpurun.remote.ssh.transport import TimedSocket, Transport

CONNECT_S = 15.0
LOGIN_S = 30.0
CHANNEL_S = 60.0
ROOM_S = 1.0
ROOM_LOOK_S = 0.02
KEEPALIVE_S = 15
# A window as large as the largest reply: the server never waits for us, however long the round trip is.
WINDOW_BYTES = MOST_REPLY_BYTES
PACKET_BYTES = 64 << 10
_CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "aes192-ctr",
    "aes256-ctr",
)

# Makes a connection within the given number of seconds.
Dial = Callable[[float], TimedSocket]
_MOST_LINES = 6
_FEWER = (
    "Its server allows few keys to be tried (MaxAuthTries). Name the right one: --identity FILE, or --identity KEY.pub "
    "of one of the agent's (`identity` in a cluster's table); `ssh-add -L` lists those."
)
_KEYS_ALLOWED = (
    "gpurun logs in only with a key: allow that there (PubkeyAuthentication yes in sshd_config), or ask its owner."
)
_NO_MORE = "gpurun logs in only with a key: allow that for this user (AuthenticationMethods in sshd_config)."

_KINDS: dict[str, type[paramiko.PKey]] = {
    "ssh-ed25519": paramiko.Ed25519Key,
    "ssh-rsa": paramiko.RSAKey,
    **dict.fromkeys((f"ecdsa-sha2-nistp{bits}" for bits in (256, 384, 521)), paramiko.ECDSAKey),
}

# paramiko would log the server's text, and a logger without a handler prints to the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class ParamikoConnection:
    """A completed login, for use by several threads. Whoever made it closes it."""

    def __init__(self, transport: Transport, wire: TimedSocket, where: str) -> None:
        self.where = where
        self.round_trip_s = CHANNEL_S
        self._transport = transport
        self._wire = wire
        self._channels: WeakSet[paramiko.Channel] = WeakSet()
        self._counting = threading.Lock()

    @property
    def alive(self) -> bool:
        """Return whether the connection is open. If it has just broken, it may still look open."""
        return self._transport.is_active()

    @property
    def heard_mono(self) -> float:
        """Return the monotonic time when the last byte arrived; the time now while a thread is reading."""
        return self._wire.clock.monotonic() if self._transport.is_taking else self._wire.heard_mono

    def channel(self, window_bytes: int = WINDOW_BYTES, take: Take | None = None) -> paramiko.Channel | None:
        """Return a new channel for one program; None if the server allows no more beside the open ones.

        Data from the program is kept until it is read or, with `take`, passed on at once by the connection's own
        thread. Raises paramiko's errors.
        """
        clock, end_mono = self._wire.clock, self._wire.clock.monotonic() + ROOM_S
        while True:
            asked_mono = clock.monotonic()
            try:
                channel = self._transport.open_session(window_bytes, PACKET_BYTES, timeout=CHANNEL_S)
                break
            except paramiko.SSHException:
                is_answered = self.alive and clock.monotonic() - asked_mono < CHANNEL_S
                if is_answered and self._has_open():
                    return None
                # Otherwise the server may not yet have noticed that the previous program has ended.
                if not is_answered or clock.monotonic() >= end_mono:
                    raise
                clock.sleep(ROOM_LOOK_S)
        self.round_trip_s = min(self.round_trip_s, clock.monotonic() - asked_mono)
        with self._counting:
            self._channels.add(channel)
        if take is not None:
            channel.take = take  # type: ignore[attr-defined]  # For our own transport.
        return channel

    def onward(self, address: Address, limit_s: float) -> paramiko.Channel:
        """Return a channel to another host through this one. Raises paramiko's errors.

        The channel ends if nothing arrives for a long time. The connection that uses it requests signs of life, so
        something should arrive.
        """
        to = (address.host, address.port)
        channel = self._transport.open_channel(
            "direct-tcpip", to, ("127.0.0.1", 0), WINDOW_BYTES, PACKET_BYTES, timeout=limit_s
        )
        channel.settimeout(4 * KEEPALIVE_S)
        return channel

    def _has_open(self) -> bool:
        """Return whether a program is open whose end the server has not reported."""
        with self._counting:
            return any(not channel.closed for channel in self._channels)

    def close(self) -> None:
        """Close the connection with its thread and its socket, even if it has ended."""
        _end_connection(self._transport, self._wire)


def connect(
    address: Address,
    key: Path | str | None,
    expected: ExpectedKey,
    clock: Clock,
    limit_s: float,
    jump: Jump | None = None,
) -> ParamikoConnection:
    """Log in to the host with the expected key, using the keys of `identities` and nothing else.

    Raise MachineLost if the host cannot be reached or does not accept a key (yet), HostKeyMismatch if it is another
    host, and SetupError if the user's key cannot be used.
    """
    with identities(key) as keys:
        transport, wire = _connect_to_expected(
            address, expected, clock, limit_s, _choose_dial(address, clock, key, jump)
        )
        try:
            transport.auth_timeout = min(LOGIN_S, limit_s)
            _log_in(transport, address, keys)
            wire.allowance_bytes = None
            transport.packetizer.set_keepalive(KEEPALIVE_S, lambda: _ask_for_life(transport))
        except BaseException:
            _end_connection(transport, wire)
            raise
    return ParamikoConnection(transport, wire, address.place)


def shown_key(
    address: Address, offer: tuple[str, ...], clock: Clock, limit_s: float, key: Path | str | None, jump: Jump | None
) -> str | None:
    """Return the public line of the host key that a host shows for these algorithms; None if it has no such key.

    There is no login to this host. If there is a host on the way, the key logs in to that one.
    """
    greeted = _connect_and_agree(address, offer, clock, limit_s, _choose_dial(address, clock, key, jump))
    if greeted is None:
        return None
    transport, wire, line = greeted
    _end_connection(transport, wire)
    return line


def _connect_to_expected(
    address: Address, expected: ExpectedKey, clock: Clock, limit_s: float, dial: Dial
) -> tuple[Transport, TimedSocket]:
    """Return an encrypted connection to the expected host. Nothing has been sent over it yet.

    A host has several keys and shows one of the requested type. With only a fingerprint this may need several tries.
    """
    got = ""
    for offer in expected.offers:
        greeted = _connect_and_agree(address, offer, clock, limit_s, dial)
        if greeted is not None:
            transport, wire, line = greeted
            if fingerprint(line) == expected.fingerprint:
                return transport, wire
            _end_connection(transport, wire)
            got = got or fingerprint(line)
    raise HostKeyMismatch(address.place, expected.fingerprint, got or f"none of type {expected.kind}")


def _connect_and_agree(
    address: Address, offer: tuple[str, ...], clock: Clock, limit_s: float, dial: Dial
) -> tuple[Transport, TimedSocket, str] | None:
    """Connect and agree on keys. Return the connection and the host's public line; None if it has no such key."""
    end = clock.monotonic() + min(CONNECT_S, limit_s)
    wire = dial(min(CONNECT_S, limit_s))
    transport = Transport(wire)
    try:
        left_s = max(0.1, end - clock.monotonic())
        transport.banner_timeout = transport.handshake_timeout = left_s
        options = transport.get_security_options()
        options.key_types = offer
        options.ciphers = _CIPHERS
        options.compression = ("none",)
        transport.start_client(timeout=left_s)
        key = transport.get_remote_server_key()
    except IncompatiblePeer as error:
        _end_connection(transport, wire)
        if "host key" in str(error):
            return None
        raise _no_common_error(transport, address, error) from error
    except Exception as error:  # Untrusted input can make the code of the protocol raise any exception.
        _end_connection(transport, wire)
        raise MachineLost(f"{address.place} answers, but not as an SSH server: {error_words(error)}.") from error
    except BaseException:
        _end_connection(transport, wire)
        raise
    return transport, wire, f"{key.get_name()} {key.get_base64()}"


def _no_common_error(transport: Transport, address: Address, error: IncompatiblePeer) -> MachineLost:
    """Return the error for two sides with no algorithm in common. It contains the lists of both."""
    ours = transport.get_security_options()
    lists = {
        "kex": ("key exchange", "kex_algo_list", ours.kex, "KexAlgorithms"),
        "ciphers": ("cipher", "client_encrypt_algo_list", ours.ciphers, "Ciphers"),
        "macs": ("MAC", "client_mac_algo_list", ours.digests, "MACs"),
    }
    for word, (kind, name, taken, option) in lists.items():
        if word in str(error) and name in transport.offered:
            offered = last_words(", ".join(transport.offered[name]))
            what = f"{address.place} and gpurun have no {kind} in common: it offers {offered}"
            hint = f"Allow one that gpurun supports in its SSH server: {option} in sshd_config."
            return MachineLost(f"{what}; gpurun supports {', '.join(taken)}.", code="ssh.nothing_in_common", hint=hint)
    return MachineLost(f"{address.place} uses an incompatible SSH: {error_words(error)}.")


def _choose_dial(address: Address, clock: Clock, key: Path | str | None, jump: Jump | None) -> Dial:
    """Return the function that connects to an address: directly, or through the host on the way."""
    return partial(_dial, address, clock) if jump is None else partial(_dial_through, jump, address, clock, key)


def _dial_through(jump: Jump, address: Address, clock: Clock, key: Path | str | None, limit_s: float) -> TimedSocket:
    """Return a connection through a host on the way, like `ssh -J`. If either end closes, all of it closes."""
    over = connect(jump.address, key, jump.expected, clock, limit_s)
    try:
        channel = over.onward(address, limit_s)
    except Exception as error:
        over.close()
        what = f"{jump.address.place} cannot connect to {address.place}: {error_words(error)}."
        raise MachineLost(what) from error
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(Exception):
            while block := theirs.recv(PACKET_BYTES):
                channel.sendall(block)
        over.close()
        theirs.close()

    def receive() -> None:
        with suppress(Exception):
            while block := channel.recv(PACKET_BYTES):
                theirs.sendall(block)
        with suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)

    for pump in (send, receive):
        threading.Thread(target=pump, daemon=True).start()
    return _wire(ours, clock)


def _dial(address: Address, clock: Clock, limit_s: float) -> TimedSocket:
    """Return the TCP connection. Raise MachineLost with the reason if it failed."""
    where = address.place
    try:
        plain = socket.create_connection((address.host, address.port), limit_s)
    except socket.gaierror as error:
        raise MachineLost(f"The name {address.host} cannot be resolved: {error_words(error)}.") from error
    except ConnectionRefusedError as error:
        raise MachineLost(f"{where} refuses connections: no SSH server listens there.") from error
    except TimeoutError as error:
        raise MachineLost(f"{where} cannot be reached: no answer in {limit_s:.0f} s.") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise SetupError("ssh.no_files", "This process cannot open any more files.", hint="ulimit -n") from error
        raise MachineLost(f"{where} cannot be reached: {error_words(error)}.") from error
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _wire(plain, clock)


def _wire(plain: socket.socket, clock: Clock) -> TimedSocket:
    wire = TimedSocket(fileno=plain.detach())
    wire.clock, wire.heard_mono = clock, clock.monotonic()
    return wire


def _log_in(transport: Transport, address: Address, keys: Sequence[paramiko.PKey]) -> None:
    """Offer the keys in turn, or no key. Raise MachineLost if none is accepted: a booting machine may do so later."""
    where = address.place
    refused = ""
    methods = list[str]()
    for tried, key in enumerate(keys or (None,)):
        try:
            if key is None:
                transport.auth_none(address.user)
            else:
                transport.auth_publickey(address.user, key)
        except paramiko.AuthenticationException as error:
            refused = error_words(error)
            methods = error.allowed_types if isinstance(error, paramiko.BadAuthenticationType) else methods
            if not transport.is_active() and tried + 1 < len(keys):
                raise _too_many_keys_error(address, tried + 1, len(keys)) from error
            continue
        except (
            Exception
        ) as error:  # As in _connect_and_agree. A server with a limit on keys may close the connection here.
            if refused:
                raise _too_many_keys_error(address, tried, len(keys)) from error
            raise MachineLost(f"{where} closed the connection during the login: {error_words(error)}.") from error
        if transport.is_authenticated():
            return
        raise MachineLost(
            f"{where} requires more than a key from {address.user}.", code="ssh.more_than_key", hint=_NO_MORE
        )
    if keys and methods and "publickey" not in methods:
        ways = " or ".join(last_words(method.encode()) for method in methods[:_MOST_LINES])
        what = f"{where} accepts only {ways} for {address.user}, and no key."
        raise MachineLost(what, code="ssh.no_key_taken", hint=_KEYS_ALLOWED)
    hint = f"One of these lines must be in ~/.ssh/authorized_keys of {address.user} there:"
    lines = "".join(f"\n{key.get_name()} {key.get_base64()}" for key in keys[:_MOST_LINES])
    what = f"{where} does not let {address.user} in: {refused}."
    raise MachineLost(what, code="ssh.not_let_in", hint=f"{hint}{lines}" if lines else "")


def _too_many_keys_error(address: Address, tried: int, count: int) -> MachineLost:
    """Return the error for a server that ended the login before every key was tried: another may be right."""
    what = f"{address.place} ended the login of {address.user} after {tried} of {count} keys, and accepted none."
    return MachineLost(what, code="ssh.too_many_keys", hint=_FEWER)


@contextmanager
def identities(named: Path | str | None) -> Iterator[list[paramiko.PKey]]:
    """Yield the keys to try in turn: that of a private key file, those of the SSH agent with `agent`, or none.

    A public key's file selects this key of the agent. Raise SetupError if the file has no usable key, and MachineLost
    if the agent has none, because that may change.
    """
    picked = public_part(Path(named)) if named and named != AGENT else None
    if named != AGENT and picked is None:
        yield [_read_key(Path(named))] if named else []
        return
    why = "holds no key, or there is none" if picked is None else f"does not hold the key of {named}, or there is none"
    try:
        agent = paramiko.Agent()
    except Exception as error:  # noqa: BLE001 - an agent may send anything, and the library has no error for that
        agent, why = None, f"does not answer: {error_words(error)}"
    held: Sequence[paramiko.PKey] = agent.get_keys() if agent is not None else ()
    keys = [key for key in held if picked in (None, key.asbytes())]
    if agent is None or not keys:
        hint = "`ssh-add -l` lists its keys, `ssh-add FILE` gives it one; SSH_AUTH_SOCK says where it is."
        private = "" if picked is None else " Without .pub the name means the private key's file."
        raise MachineLost(f"The SSH agent {why}.", code="ssh.agent", hint=hint + private)
    try:
        yield keys
    finally:
        agent.close()


def _read_key(path: Path) -> paramiko.PKey:
    """Return the private key in a file, with the certificate beside it; `private_key` reads more than paramiko."""
    kind, text = private_key(path)
    try:
        key = _KINDS[kind].from_private_key(StringIO(text))
        certificate = path.with_name(f"{path.name}-cert.pub")
        if certificate.exists():
            key.load_certificate(str(certificate))
    except Exception as error:
        hint = "Name another with --identity, or leave that out to use gpurun's own."
        raise SetupError(
            "ssh.identity", f"The key file {path} cannot be used: {error_words(error)}.", hint=hint
        ) from error
    return key


def _ask_for_life(transport: Transport) -> None:
    """Send a request to which every server replies, if only with a refusal; paramiko's keepalive requests no reply."""
    message = paramiko.Message()
    message.add_byte(cMSG_GLOBAL_REQUEST)
    message.add_string("keepalive@openssh.com")
    message.add_boolean(True)
    transport._send_user_message(message)


def _end_connection(transport: Transport, wire: TimedSocket) -> None:
    """Close the connection completely: wake its thread, which reads, before the socket is closed."""
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)
    transport.close()
    transport.packetizer.complete_handshake()  # Otherwise its timer would continue.
    if transport.is_alive():
        transport.join(1.0)
    wire.close()
