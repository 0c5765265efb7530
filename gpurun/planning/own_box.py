"""A box that the user has is asked before its plan is shown: its host key, and whether it runs one program for us."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.known_hosts import known_host, remember_host
from gpurun.core.paths import Home
from gpurun.core.records import Address
from gpurun.core.run_plan import Box, Request
from gpurun.core.untrusted import last_words
from gpurun.providers.ssh_login import Login
from gpurun.remote.interface import MachineLost
from gpurun.remote.key_pairs import AGENT, fingerprint, make_keys
from gpurun.remote.ssh import RemoteMachine, scan_host_key

Trust = Literal["given", "known", "first use"]
SCAN_S = 15.0
ANSWER_S = 20.0
_TRUST: Mapping[Trust, str] = {
    "given": "Its host key is the one given with --host-key",
    "known": "Its host key is the one seen at an earlier run",
    "first use": "Its host key was seen for the first time and is trusted from now on; compare it",
}
# Its folder is a throwaway: that it could be made is what a run needs of the home.
_ANSWER = (
    '"$1" -I -S -c "import sys; sys.exit(sys.version_info < (3, 8))"; code=$?; '
    'here=$PWD; cd .. && rmdir -- "$here"; exit "$code"'
)


def reached(request: Request, login: Login, home: Home, clock: Clock) -> Box:
    """How the box is logged in to, once it has run a program for us; SetupError with its own words where it does not.

    A refusal costs half a minute and opens nothing: in a run the same would be tried for minutes, for it may boot.
    """
    identity = _identity(request, home)
    with _for_good():
        _load(identity)
        host_key, trusted = _host_key(request, login, home, clock)
        box = Box(target=str(login), identity=identity, host_key=host_key, trusted=trusted)
        _answers(box, login, clock)
    return box


def about_box(box: Box) -> list[str]:
    """What a plan says of how its box is reached."""
    told = [f"{_TRUST[box.trusted]}: {fingerprint(box.host_key)}."]
    if box.identity == AGENT:
        told.append("It is logged in to by your SSH agent, also when a line was cut: keep that up until the run's end.")
    return told


@contextmanager
def _for_good() -> Iterator[None]:
    """What a rented machine may yet come to while it boots is a refusal here."""
    try:
        yield
    except MachineLost as lost:
        if lost.code != "machine.lost":
            raise SetupError(lost.code, lost.what, hint=lost.hint) from lost
        hint = "Check the host and the port, and that the machine is up: ssh -p PORT USER@HOST."
        raise SetupError("host.unreachable", lost.what, hint=hint) from lost


def _identity(request: Request, home: Home) -> str:
    """What to log in with: the file or the agent that was named, or gpurun's own key, made at the first use."""
    if request.identity == AGENT:
        return AGENT
    if request.identity:
        path = Path(request.identity).expanduser().absolute()
        if not path.is_file():
            hint = "Name a private key file, or `agent`, or leave --identity out to use gpurun's own."
            raise UsageError("identity.missing", f"There is no key file {path}.", hint=hint)
        return str(path)
    folder = home.keys / "ssh"
    is_new = not (folder / "client").exists()
    public = make_keys(folder).client_public
    if is_new:
        raise SetupError(
            "ssh.new_identity",
            "gpurun uses no key of yours unasked, so it has made one of its own for your boxes.",
            hint="Add this line to ~/.ssh/authorized_keys there, then run it again (or name --identity FILE):\n"
            f"{public}",
        )
    return str(folder / "client")


def _load(identity: str) -> None:
    """Refuse a key that cannot be used, before anybody is asked anything."""
    from gpurun.remote.ssh.connection import identities

    with identities(identity):
        pass


def _host_key(request: Request, login: Login, home: Home, clock: Clock) -> tuple[str, Trust]:
    """The host key to expect, and why it is trusted; one that changed since the last run is refused."""
    if request.host_key:
        return request.host_key, "given"
    seen = scan_host_key(login.host, login.port, clock, SCAN_S)
    known = known_host(home, login.host, login.port)
    if known is None:
        remember_host(home, login.host, login.port, seen)
        return seen, "first use"
    if known.split()[:2] != seen.split()[:2]:
        raise SetupError(
            "ssh.host_key_changed",
            f"{login.host} shows another host key than at the last run: {fingerprint(seen)}, not {fingerprint(known)}.",
            hint="If the machine was installed again, give its new key: --host-key SHA256:… . Else it is another one.",
        )
    return seen, "known"


def _answers(box: Box, login: Login, clock: Clock) -> None:
    """Have it run one program in a folder below its home, as every step of a run does."""
    address = Address(kind="ssh", host=login.host, port=login.port, user=login.user)
    folder = f".gpurun/look-{secrets.token_hex(4)}"
    machine = RemoteMachine(address, client_key=box.identity, host_key=box.host_key, folder=folder, clock=clock)
    try:
        reply = machine.call(["sh", "-c", _ANSWER, "gpurun", "python3"], timeout_s=ANSWER_S)
    finally:
        machine.close()
    if reply.exit_code:
        words = last_words(reply.stderr)
        what = f"{login} has no python3 of 3.8 or newer" + (f": {words}." if words else ".")
        raise SetupError("box.no_python", what, hint="Install one there.")
