"""A machine reached by the user's own `ssh`: an entry of ~/.ssh/config, with its proxy, keys and prompts.

One master connection is opened when the user can answer the login's questions, and every program runs over it. It is
kept for KEPT_S after its last use. Only name, port, user, proxy and key are taken from the entry, as `ssh -G` resolves
them. Then ssh reads no configuration, so that no agent, port or variable is forwarded, and no command of the entry
runs. The host key is pinned as everywhere: it is in gpurun's own file, and no other key is accepted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.filelock import exclusive
from gpurun.core.records import Address
from gpurun.core.secrets import child_environment
from gpurun.core.untrusted import last_words
from gpurun.remote.interface import NEEDS_PERSON, MachineLost, Take
from gpurun.remote.key_pairs import fingerprint
from gpurun.remote.ssh.entry import CONNECT_S, NOTHING_ELSE
from gpurun.remote.ssh.host_key import HostKeyMismatch
from gpurun.remote.ssh.ssh_machine import RemoteMachine

KEPT_S = 600
ASKED_S = 180.0
"""How many seconds the user has to type a password and a code."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_JUMP = re.compile(r"(ssh://)?[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*")
_TAKEN = (
    "identityfile",
    "certificatefile",
    "identityagent",
    "identitiesonly",
    "pkcs11provider",
    "securitykeyprovider",
    "gssapiauthentication",
)
_NAMES_A_PLACE = ("hostname", "user", "port", "proxycommand", "proxyjump", "identityfile", "certificatefile")
_PASSED_ON = ("SSH_AUTH_SOCK", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE", "SSH_SK_PROVIDER", "DISPLAY", "KRB5CCNAME", "TERM")
# $1 the public line. As in `program`, no backslash, exclamation mark or line break: the login shell may be any.
_INSTALL = (
    'umask 077; cd && mkdir -p .ssh && f=.ssh/authorized_keys && touch "$f" && '
    'if [ -n "$(tail -c 1 "$f")" ]; then echo >> "$f"; fi && '
    'if grep -qxF -- "$1" "$f"; then :; else printf "%s" "$1" >> "$f" && echo >> "$f"; fi'
)
_SHOWS_ANOTHER = "Host key verification failed"
_ASKS_FOR_MORE = "Permission denied"


@dataclass(frozen=True)
class Entry:
    """The meaning of a name in ~/.ssh/config: the address, and ssh's options to connect to it."""

    name: str
    address: Address
    options: tuple[str, ...]
    is_by_proxy: bool


def read_entry(name: str, identity: str = "") -> Entry | None:
    """Return the entry to which `ssh -G` resolves a name; None if there is no such entry.

    If `identity` is given, it is the only key. Raise UsageError for an invalid name, and SetupError if ssh is missing
    or fails.
    """
    if not NAME.fullmatch(name):
        hint = "A name may have letters, digits, dots, _ and -, but must not begin with _ or -."
        raise UsageError("host.malformed", f"{name!r} cannot be the name of an entry in ~/.ssh/config.", hint=hint)
    found, plain = _resolve_options(name), _resolve_options(name, "-F", "none")
    if all(found.get(key) == plain.get(key) for key in _NAMES_A_PLACE):
        return None
    proxy = _build_proxy_command(name, found)
    kept = [
        f'{key}="{value}"'
        for key in _TAKEN
        if not (identity and key.startswith("identi"))
        for value in found.get(key, ())
    ]
    if identity:
        kept += [f"IdentityFile={_quote_value(identity)}", "IdentitiesOnly=yes"]
    (host, *_), (user, *_), (port, *_) = found["hostname"], found["user"], found["port"]
    address = Address(kind="ssh", host=host.lower(), port=int(port), user=user)
    return Entry(name, address, (*_host_options(address, proxy), *kept), bool(proxy))


def _host_options(address: Address, proxy: str) -> tuple[str, ...]:
    place = f"HostName={address.host}", f"User={address.user}", f"Port={address.port}"
    return *place, f"ProxyCommand={proxy or 'none'}"


def _resolve_options(name: str, *more: str) -> Mapping[str, tuple[str, ...]]:
    """Return every option that ssh would use for a name, in lower case, with its values."""
    done = _run_ssh("-G", *more, "--", name, limit_s=CONNECT_S)
    if done.returncode:
        what = f"`ssh -G {name}` fails: {last_words(done.stderr)}."
        raise SetupError("ssh.config", what, hint="Fix ~/.ssh/config, then check it with that command.")
    found = dict[str, tuple[str, ...]]()
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(" ")
        found[key] = (*found.get(key, ()), value)
    return found


def _build_proxy_command(name: str, found: Mapping[str, tuple[str, ...]]) -> str:
    """Return an entry's proxy command, into which jumps are converted; "" if there is none."""
    (command,), (jumps,) = found.get("proxycommand", ("none",)), found.get("proxyjump", ("none",))
    if command != "none" or jumps == "none":
        return "" if command == "none" else command
    hosts = jumps.split(",")
    if not all(_JUMP.fullmatch(host) for host in hosts):
        hint = "Write it as user@host:port, or as the name of another entry."
        raise UsageError("host.jump", f"ProxyJump of {name} in ~/.ssh/config is {jumps!r}.", hint=hint)
    *before, last = (host if host.startswith("ssh://") else f"ssh://{host}" for host in hosts)
    over = ["-J", ",".join(before)] if before else []
    words = ["ssh", *over, "-o", "PermitLocalCommand=no", "-W", "[%h]:%p", "--", last]
    return shlex.join(words)


def scan_entry(entry: Entry, *, asks: bool) -> str:
    """Return the public line of the host key that an entry's host shows. There is no login."""
    with tempfile.TemporaryDirectory(prefix="gpurun-") as folder:
        shown = Path(folder) / "known_hosts"
        looks = (
            *_list_options(entry, shown),
            "-o",
            "StrictHostKeyChecking=accept-new",
            "-o",
            "PreferredAuthentications=none",
        )
        done = _run_ssh(
            *looks,
            "-o",
            f"BatchMode={_format_bool(not asks)}",
            "--",
            entry.name,
            "exit",
            limit_s=3 * CONNECT_S,
            asks=asks,
        )
        with suppress(OSError):
            return " ".join(shown.read_text(encoding="ascii").split()[1:3])
    raise MachineLost(f"{entry.name} ({entry.address.place}) shows no host key: {_describe_reason(done.stderr)}.")


def install_key(address: Address, host_key: str, public_line: str) -> None:
    """Let ssh ask for a password in the terminal, and add a public key to the login's authorized_keys.

    The user types the password to ssh; gpurun does not see it. Raise MachineLost if that failed.
    """
    entry = Entry(address.host, address, _host_options(address, ""), is_by_proxy=False)
    with tempfile.TemporaryDirectory(prefix="gpurun-") as folder:
        known = Path(folder) / "known_hosts"
        known.write_text(f"{entry.name} {host_key}\n", encoding="ascii")
        line = "exec " + shlex.join(["sh", "-c", _INSTALL, "gpurun", public_line])
        asks = ("-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=keyboard-interactive,password")
        words = (*_list_options(entry, known), *asks, "-o", "StrictHostKeyChecking=yes", "-T", "--", entry.name, line)
        done = _run_ssh(*words, limit_s=ASKED_S, asks=True, tells=True)
    if done.returncode:
        what = f"No key was installed for {address.user} at {address.place}: {_describe_reason(done.stderr)}."
        hint = "If there is no password for it, add the key on the platform's web page."
        raise MachineLost(what, code="ssh.not_installed", hint=hint)


class OpensshMachine(RemoteMachine):
    """See `RemoteMachine`. The connection is the master connection to an entry, which is opened if there is none.

    `asks` means that a user is at the terminal, whom ssh asks what the login requires. Otherwise a login that requires
    more than a key raises a MachineLost that says how to open the connection again.
    """

    def __init__(
        self,
        name: str,
        *,
        identity: str,
        host_key: str,
        folder: str,
        clock: Clock,
        last_mono: float = inf,
        asks: bool = False,
    ) -> None:
        self._master = Master(name, identity, host_key, asks=asks)
        address = Address(kind="ssh", host=name, port=22, user="")
        super().__init__(address, client_key=None, host_key=host_key, folder=folder, clock=clock, last_mono=last_mono)
        self._where = name

    def answers(self, limit_s: float) -> bool:
        """See `Answers.answers`. This uses the master, which notices within a minute that it was cut off."""
        with suppress(MachineLost):
            return self.call(["true"], timeout_s=limit_s).exit_code == 0
        return False

    def _open(self, limit_s: float) -> MasterConnection:
        self._master.open(limit_s)
        return MasterConnection(self._master, self._clock)


class Master:
    """The only connection to an entry. It does not belong to its users, and stays open for KEPT_S after them."""

    def __init__(self, name: str, identity: str, host_key: str, *, asks: bool) -> None:
        self.name, self.asks = name, asks
        self._identity, self._host_key = identity, host_key
        stem = hashlib.sha256("\0".join((name, identity, host_key)).encode()).hexdigest()[:16]
        self._folder = Path("/tmp") / f"gpurun-{os.getuid()}"  # A socket's path has at most 104 bytes on a Mac.
        self._socket, self._known = self._folder / stem, self._folder / f"{stem}.known"

    @property
    def is_open(self) -> bool:
        """Return whether the connection is open and accepts programs."""
        return self._socket.exists() and _run_ssh(*self.argv("-O", "check"), limit_s=CONNECT_S).returncode == 0

    def open(self, limit_s: float) -> None:
        """Log in if necessary, and leave the connection in the background.

        Raise HostKeyMismatch if another host replies. Raise MachineLost if the host cannot be reached, or if the login
        asks something and no user is at a terminal.
        """
        _make_private_folder(self._folder)
        with exclusive(self._folder / f"{self._socket.name}.lock"):
            if self.is_open:
                return
            self._socket.unlink(missing_ok=True)
            entry = read_entry(self.name, self._identity)
            if entry is None:
                hint = "Restore the entry, or start the run again with user@host."
                raise MachineLost(f"~/.ssh/config no longer has an entry {self.name}.", code="ssh.no_entry", hint=hint)
            self._known.write_text(f"{self.name} {self._host_key}\n", encoding="ascii")
            master = ("-M", "-N", "-f", "-S", str(self._socket), "-o", f"ControlPersist={KEPT_S}")
            strict = ("-o", "StrictHostKeyChecking=yes", "-o", f"BatchMode={_format_bool(not self.asks)}", *master)
            limit_s = ASKED_S if self.asks else max(CONNECT_S, min(limit_s, 3 * CONNECT_S))
            words = (*_list_options(entry, self._known), *strict, "--", self.name)
            done = _run_ssh(*words, limit_s=limit_s, asks=self.asks, tells=self.asks)
            if done.returncode:
                raise self._refusal_error(entry, done.stderr)

    def argv(self, *words: str, command: str = "") -> list[str]:
        """Return ssh's arguments for an action of the master. ssh then never connects by itself."""
        alone = ("-F", "none", "-S", str(self._socket), "-o", "ControlMaster=no", "-o", "BatchMode=yes")
        last = ["--", self.name, *([command] if command else [])]
        return [*alone, "-o", "ProxyCommand=false", "-T", *words, *last]

    def close(self) -> None:
        """Close the connection for all its users, if there is one."""
        if self._socket.exists():
            _run_ssh(*self.argv("-O", "exit"), limit_s=CONNECT_S)
        self._known.unlink(missing_ok=True)

    def _refusal_error(self, entry: Entry, stderr: bytes) -> MachineLost:
        words = _describe_reason(stderr)
        where = f"{self.name} ({entry.address.user}@{entry.address.place})"
        if _SHOWS_ANOTHER in words:
            return HostKeyMismatch(where, fingerprint(self._host_key), "another one")
        if _ASKS_FOR_MORE in words and not self.asks:
            what = f"The connection to {where} has ended, and its login requires more than a key: {words}."
            hint = "Type `gpurun resume` at a terminal: ssh asks there, and the run continues over that connection."
            return MachineLost(what, code=NEEDS_PERSON, hint=hint)
        what = f"`ssh {self.name}` does not log in as {entry.address.user}: {words}."
        hint = f"Your own ssh reported this: `ssh {self.name} true` must succeed."
        return MachineLost(what, code="ssh.not_let_in", hint=hint)


class MasterConnection:
    """The master as a connection for `RemoteMachine`. Closing this connection leaves the master open."""

    def __init__(self, master: Master, clock: Clock) -> None:
        self.where = master.name
        self._master, self._clock = master, clock
        began_mono = clock.monotonic()
        _run_ssh(*master.argv(command="exit"), limit_s=CONNECT_S)
        self.round_trip_s = clock.monotonic() - began_mono
        self._is_closed = False

    @property
    def alive(self) -> bool:
        """Return whether this connection is still used. If the master has ended, the next program notices it."""
        return not self._is_closed

    @property
    def heard_mono(self) -> float:
        """Return the time now: the master itself requests signs of life, and ends if there are none."""
        return self._clock.monotonic()

    def channel(self, window_bytes: int = 0, take: Take | None = None) -> ProcessChannel:
        """Return a channel for one program. Its output is kept in a pipe until it is read."""
        return ProcessChannel(self._master)

    def close(self) -> None:
        """Stop using the master, which stays open."""
        self._is_closed = True


class ProcessChannel:
    """One program over the master: a separate ssh process with pipes."""

    def __init__(self, master: Master) -> None:
        self.status_event, self.exit_status, self.eof_received = threading.Event(), -1, False
        self._master = master
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = threading.Event()

    @property
    def closed(self) -> bool:
        """Return whether nothing more can arrive."""
        return self.status_event.is_set()

    def exec_command(self, command: str) -> None:
        """Start the program in the login shell."""
        process = self._process = subprocess.Popen(
            [_find_program(), "-o", "LogLevel=ERROR", *self._master.argv(command=command)],
            env=_build_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._begun.set()
        threading.Thread(target=self._wait, args=(process,), daemon=True).start()

    def recv(self, size: int) -> bytes:
        """Return standard output that has arrived; b"" at its end."""
        block = self._read("stdout", size)
        self.eof_received |= not block
        return block

    def recv_stderr(self, size: int) -> bytes:
        """Return standard error that has arrived; b"" at its end."""
        return self._read("stderr", size)

    def send(self, data: bytes) -> int:
        """Send what fits. Raise OSError if the program accepts nothing more."""
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.write(data) or 0

    def shutdown_write(self) -> None:
        """Tell the program that its input has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """Stop reading the program's output: kill its ssh."""
        if self._process is not None:
            self._process.kill()

    def _read(self, pipe: str, size: int) -> bytes:
        self._begun.wait()
        stream = getattr(self._process, pipe)
        return bytes(stream.read(size) or b"")

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Store the exit code. 255 is also ssh's own, if the master has ended."""
        code = process.wait()
        self.exit_status = -1 if code < 0 or (code == 255 and not self._master.is_open) else code
        self.status_event.set()


def _list_options(entry: Entry, known_hosts: Path) -> list[str]:
    """Return ssh's options for an entry: its own, nothing else, and one file of host keys."""
    options = [
        *entry.options,
        *NOTHING_ELSE,
        "ClearAllForwardings=yes",
        "EscapeChar=none",
        f"HostKeyAlias={entry.name}",
        f"UserKnownHostsFile={_quote_value(str(known_hosts))}",
    ]
    return ["-F", "none", *(word for option in options for word in ("-o", option))]


def _run_ssh(
    *words: str, limit_s: float, asks: bool = False, tells: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """Run the system's ssh to its end. With `asks` it may ask at the terminal, with `tells` it may print to it."""
    argv = [_find_program(), "-o", f"LogLevel={'INFO' if tells else 'ERROR'}", *words]
    # A master in the background may keep a pipe open, and the user must read the login's text before its prompt.
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                argv,
                env=_build_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if "-G" in words else subprocess.DEVNULL,
                stderr=None if tells else errors,
                timeout=limit_s,
                start_new_session=not asks,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 255, b"", f"it did not end in {limit_s:.0f} s".encode())
        errors.seek(0)
        return subprocess.CompletedProcess(argv, done.returncode, done.stdout or b"", errors.read())


def _find_program() -> str:
    """Return the path of the system's ssh. Raise SetupError if there is none."""
    program = shutil.which("ssh")
    if program is None:
        hint = "Install OpenSSH's client (openssh-client), or name the box as user@host: gpurun then logs in itself."
        raise SetupError(
            "ssh.no_openssh", "Reaching an entry of ~/.ssh/config needs `ssh`, which is not installed here.", hint=hint
        )
    return program


def _build_environment() -> dict[str, str]:
    """Return the environment for ssh: where the agent is, and how ssh asks."""
    return child_environment({name: os.environ[name] for name in _PASSED_ON if name in os.environ})


def _describe_reason(stderr: bytes) -> str:
    return last_words(stderr) or "its own lines above say why"


def _quote_value(value: str) -> str:
    """Return an option's value, quoted so that ssh does not interpret spaces or tokens in it."""
    return f'"{value.replace("%", "%%")}"'


def _format_bool(value: bool) -> str:
    return "yes" if value else "no"


def _make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can use. Raise SetupError if it exists and others can use it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise SetupError("ssh.folder", f"{folder} is not a folder of yours alone.", hint=f"Remove it: rm -r {folder}")
