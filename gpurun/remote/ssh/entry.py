"""One machine as an entry of an OpenSSH configuration: the address, the key, the host key, and nothing else.

The values are from a provider, a plan or a table. A value that ssh could interpret is refused.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from gpurun.core.errors import SetupError
from gpurun.core.records import Address
from gpurun.remote.key_pairs import AGENT
from gpurun.remote.ssh.host_key import ALGORITHMS

CONNECT_S = 15
NOTHING_ELSE = (
    "GlobalKnownHostsFile=/dev/null",
    "UpdateHostKeys=no",
    "VerifyHostKeyDNS=no",
    "CheckHostIP=no",
    "HashKnownHosts=no",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "GSSAPIDelegateCredentials=no",
    f"ConnectTimeout={CONNECT_S}",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
)
"""Options for every ssh of gpurun, so that nothing in the user's own configuration applies."""
# ssh uses the first value that it reads, so a `Host *` of the user has no effect.
_OF_AN_ENTRY = (
    "StrictHostKeyChecking=yes",
    *NOTHING_ELSE,
    "PreferredAuthentications=publickey",
    "ControlMaster=no",
    "ControlPath=none",
)
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,79}")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_PATH = re.compile(r"""/[^\x00-\x1f\x7f"\\$*?\[]*""")


@dataclass(frozen=True)
class HostEntry:
    """`Host ALIAS`: its address, the login key (a file, or the user's agent), and the expected host key.

    `jump` is the host on the way, which has its own entry.
    """

    alias: str
    address: Address
    identity: str
    host_key: str
    jump: HostEntry | None = None

    def __post_init__(self) -> None:
        kind, _, encoded = self.host_key.partition(" ")
        values = ((_HOST, self.address.host), (_USER, self.address.user), (_BASE64, encoded))
        for shape, value in values:
            if not shape.fullmatch(value):
                raise _unwritable_error(value)
        if kind not in ALGORITHMS:
            raise _unwritable_error(self.host_key)
        if self.identity != AGENT:
            quote_for_ssh(self.identity)

    def config(self, known_hosts: Path, file: Path) -> str:
        """Return the lines of this entry and of the host on the way, for the configuration `file`."""
        way = f"ProxyCommand {proxy_command(file, self.jump.alias) if self.jump else 'none'}"
        keys = (
            ""
            if self.identity == AGENT
            else f"    IdentityFile {quote_for_ssh(self.identity)}\n    IdentitiesOnly yes\n"
        )
        own = (
            f"Host {self.alias}\n"
            f"    HostName {self.address.host}\n"
            f"    Port {self.address.port}\n"
            f"    User {self.address.user}\n"
            f"{keys}"
            f"    HostKeyAlias {self.alias}\n"
            f"    UserKnownHostsFile {quote_for_ssh(str(known_hosts))}\n"
            f"    {way}\n" + "".join(f"    {option.replace('=', ' ', 1)}\n" for option in _OF_AN_ENTRY)
        )
        return own + (self.jump.config(known_hosts, file) if self.jump else "")

    def known(self) -> str:
        """Return the lines of this entry for a known-hosts file."""
        return f"{self.alias} {self.host_key}\n" + (self.jump.known() if self.jump else "")


def proxy_command(file: Path, alias: str) -> str:
    """Return a ProxyCommand that uses an entry of a file. ssh's own -J does not work with a space in the path."""
    return f"ssh -F {shlex.quote(str(file)).replace('%', '%%')} -W '[%h]:%p' {alias}"


def include_line(config: Path) -> str:
    """Return the line that makes ssh read a file of entries. Some versions of ssh expand a % in it."""
    if "%" in str(config):
        raise _unwritable_error(str(config))
    return f"Include {quote_for_ssh(str(config))}"


def quote_for_ssh(path: str) -> str:
    """Return a path quoted for ssh. Raise SetupError if it cannot be quoted."""
    if not _PATH.fullmatch(path):
        raise _unwritable_error(path)
    return f'"{path.replace("%", "%%")}"'


def _unwritable_error(value: str) -> SetupError:
    what = f"{value[:200]!r} cannot be written into an OpenSSH configuration."
    hint = (
        "Names, keys and paths must not contain a quote, %, $, backslash, wildcard or line break: use another --home."
    )
    return SetupError("ssh.unwritable", what, hint=hint)
