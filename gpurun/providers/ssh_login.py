"""Parses the name of the user's own box, `user@host:port`, with a helpful error for everything else."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from gpurun.core.errors import UsageError
from gpurun.core.records import Address

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,79}")  # Also names in Active Directory: LAB\you, you@lab.example.
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?")
_PASTED = re.compile(r"ssh\s+(?:-p\s*(?P<before>\d+)\s+)?(?P<login>[^\s-][^\s]*)(?:\s+-p\s*(?P<after>\d+))?\s*")
_FORM = "Write user@host or user@host:port, for example root@203.0.113.7:22022; IPv6 in brackets: root@[2001:db8::7]"


@dataclass(frozen=True)
class Login:
    """The login on a box: user, host and port."""

    user: str
    host: str
    port: int

    @property
    def address(self) -> Address:
        """Return the login as a machine's address."""
        return Address(kind="ssh", host=self.host, port=self.port, user=self.user)

    def __str__(self) -> str:
        return f"{self.user}@{self.address.place}"


def parse_host(text: str, *, name: str = "--host") -> Login:
    """Parse `user@host` or `user@host:port`. Raises a UsageError that says what to write instead for anything else.

    The error does not repeat a password. Neither password nor host ever becomes part of a command line.
    """
    pasted = _PASTED.fullmatch(text.strip())
    login = (pasted["login"] if pasted else text.strip()).removeprefix("ssh://")
    user, at, place = login.rpartition("@")
    if ":" in user:
        raise _malformed_error(f"{name} contains a password.", "Leave the password out: gpurun logs in with a key.")
    if pasted is not None:
        port = pasted["before"] or pasted["after"]
        correction = f"Write {name} {login}" + (f":{port}" if port else "")
        raise _malformed_error(f"{name} takes the login alone, not an ssh command.", correction)
    if not at:
        hint = f"{_FORM}; or, for --host, the name of an entry of ~/.ssh/config: `ssh -G NAME` shows what it has."
        raise _malformed_error(f"{name} {text!r} has no user name.", hint)
    if not _USER.fullmatch(user):
        raise _malformed_error(f"{name} {text!r}: {user!r} is not a user name.", f"{_FORM}.")
    host, port = _split_host_and_port(place, f"{name} {text!r}")
    return Login(user, host, port)


def _split_host_and_port(place: str, where: str) -> tuple[str, int]:
    """Return host and port. The port is 22 if none is given."""
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", place)
    if bracketed is not None:
        host, port = _parse_ipv6(bracketed[1], where), bracketed[2]
    else:
        if place.count(":") > 1:
            raise _malformed_error(f"{where}: an IPv6 address must be in brackets.", f"{_FORM}.")
        name, colon, digits = place.partition(":")
        host, port = _parse_host_name(name, where), digits if colon else None
    if port is None:
        return host, 22
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise _malformed_error(
            f"{where}: {port!r} is not a port.", "A port is a number from 1 to 65535; without one it is 22."
        )
    return host, int(port)


def _parse_host_name(host: str, where: str) -> str:
    """Return a host's name or IPv4 address, in lower case."""
    if re.fullmatch(r"[\d.]+", host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _malformed_error(f"{where}: {host!r} is not an address.", f"{_FORM}.") from None
    if not _HOST_NAME.fullmatch(host):
        what = f"{host!r} is not the name of a host" if host else "there is no host"
        raise _malformed_error(f"{where}: {what}.", f"{_FORM}.")
    return host.lower().rstrip(".")


def _parse_ipv6(text: str, where: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise _malformed_error(f"{where}: {text!r} is not an IPv6 address.", f"{_FORM}.") from None


def _malformed_error(what: str, hint: str) -> UsageError:
    return UsageError("host.malformed", what, hint=hint)
