"""Checks a user's own box before its plan is shown: its host key, and whether it runs Python.

A cluster's login node is such a box too. A cluster's jobs are reached through a folder that they share with it.
"""

from __future__ import annotations

import secrets
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpurun.core.clock import Clock
from gpurun.core.cluster import Cluster, LoginNode, LoginNodeResult, NoAnswer
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.known_hosts import find_host_key, remember_host
from gpurun.core.paths import Home
from gpurun.core.places import place_facts
from gpurun.core.records import Instance
from gpurun.core.run_plan import Box, Plan, Request
from gpurun.core.secrets import child_environment
from gpurun.core.settings import find_cluster
from gpurun.core.untrusted import error_words, last_words, safe_line
from gpurun.providers.ssh_login import Login, parse_host
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, Machine, MachineLost
from gpurun.remote.job_machine import JobMachine, JobStep
from gpurun.remote.key_pairs import AGENT, fingerprint, make_keys, public_part
from gpurun.remote.local_machine import LocalMachine
from gpurun.remote.machine_facts import MachineFacts
from gpurun.remote.ssh import ExpectedKey, HostKeyMismatch, Jump, RemoteMachine, scan_host_key
from gpurun.view.number_format import format_bytes

if TYPE_CHECKING:
    from gpurun.remote.ssh.openssh import Entry

Trust = Literal["given", "known", "first use"]
SCAN_S = 15.0
ANSWER_S = 20.0
_TRUST: Mapping[Trust, str] = {
    "given": "is the one given with --host-key",
    "known": "is the one that was seen there before",
    "first use": "was seen for the first time and is trusted from now on; compare it",
}
_ANSWER = '"$1" -I -S -c "import sys; sys.exit(sys.version_info < (3, 8))"'
_AWAY = 'here=$PWD; cd .. && rm -rf -- "$here"'


def login_of(host: str) -> Login:
    """Return the user, host and port of a login: as typed, or as an entry of ~/.ssh/config has them."""
    entry = _read_ssh_entry(host)
    return parse_host(host) if entry is None else Login(entry.address.user, entry.address.host, entry.address.port)


def reach_box(
    request: Request,
    login: Login,
    home: Home,
    clock: Clock,
    *,
    asks: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Box, MachineFacts, list[str]]:
    """Return how to log in to the box, the facts that it reports, and notes about both for the plan.

    With `asks`, a user at the terminal can answer the questions of an entry's login. Raise SetupError, with the box's
    own message, if it does not run Python. A refusal takes half a minute and changes nothing. A run would retry the
    same for minutes, because a rented machine may still be booting.
    """
    if request.python and not request.python.startswith("/"):
        hint = "Write its absolute path on the box: --python /home/you/project/.venv/bin/python."
        raise UsageError("python.relative", f"--python {request.python!r} is not an absolute path.", hint=hint)
    with _refuse_lost_connection(None if request.identity or _read_ssh_entry(request.host) else login):
        box, notes = _settle_login(request, login, home, clock, asks=asks)
        facts = _read_box_facts(box, login, clock, say, asks=asks)
    if not box.entry and (box.identity == AGENT or public_part(Path(box.identity)) is not None):
        notes.append("Your SSH agent logs in, also after a lost connection: keep it running until the run's end.")
    return box, facts, [*notes, f"It has {_describe_facts(facts)}, as it reported just now."]


def make_box_machine(
    box: Box, folder: str, clock: Clock, last_mono: float = inf, *, asks: bool = False
) -> RemoteMachine:
    """Return the connection to a folder of a box, by the recorded login. The connection is not open yet."""
    if box.entry:
        from gpurun.remote.ssh.openssh import OpensshMachine

        return OpensshMachine(
            box.entry,
            identity=box.identity,
            host_key=box.host_key,
            folder=folder,
            clock=clock,
            last_mono=last_mono,
            asks=asks,
        )
    return RemoteMachine(
        parse_host(box.target).address,
        client_key=box.identity,
        host_key=box.host_key,
        folder=folder,
        clock=clock,
        last_mono=last_mono,
        jump=_make_jump(box.jump, box.jump_host_key),
    )


def known_login(cluster: Cluster, home: Home) -> Box:
    """Return how to log in to a cluster's login node, from what this home has recorded. The node is not contacted."""
    login = Login(cluster.user, cluster.host, cluster.port)
    jump = parse_host(cluster.jump, name="jump") if cluster.jump else None
    name = f"{login.host} by {jump}" if jump else login.host
    own = str(home.keys / "ssh" / "client")
    identity = cluster.identity if cluster.identity == AGENT else str(Path(cluster.identity or own).expanduser())
    return Box(
        target=str(login),
        identity=identity,
        host_key=cluster.host_key or find_host_key(home, name, login.port) or "",
        trusted="known",
        jump=str(jump) if jump else "",
        jump_host_key=(find_host_key(home, jump.host, jump.port) or "") if jump else "",
        entry=cluster.host if cluster.transport else "",
    )


def shown_host_key(box: Box, clock: Clock) -> str:
    """Return the public line of the host key that a box shows. Raise HostKeyMismatch if it is not the expected key.

    If the box shows no key, the error names only the expected fingerprint. This does not log in.
    """
    shown = make_box_machine(box, ".", clock).shown(SCAN_S)
    if shown is None:
        raise HostKeyMismatch(box.target, fingerprint(box.host_key), "others")
    return shown


def open_way(plan: Plan, home: Home, clock: Clock) -> None:
    """Log in if that needs a user and no login is open; raise an error if that fails.

    It is a GpurunError; for a cluster's login node it may also be NoAnswer.
    """
    if plan.box is not None and plan.box.entry:
        from gpurun.remote.ssh.openssh import ASKED_S, Master

        Master(plan.box.entry, plan.box.identity, plan.box.host_key, asks=True).open(ASKED_S)
    elif place_facts(plan.offer.provider).is_queued:
        cluster = find_cluster(home, plan.offer.region)
        if cluster.transport:
            login_to(cluster, home, clock, asks=True).run(["true"])


def python_of(box: Box) -> str:
    """Return the Python on a box that runs the agent and the trainer."""
    return box.python or "python3"


def demand_password_login(host: str) -> Login:
    """Return the user and host of a login with a password.

    Raise UsageError for an entry of ~/.ssh/config, which the user's own ssh handles, or for a malformed login.
    """
    if _read_ssh_entry(host) is not None:
        hint = f"Use your own ssh: ssh-copy-id {host}. gpurun also asks for a password if an entry wants one."
        raise UsageError("host.entry", f"{host} is an entry of ~/.ssh/config.", hint=hint)
    return parse_host(host, name="HOST")


def install_own_key(login: Login, home: Home, clock: Clock, say: Callable[[str], None]) -> str:
    """Install gpurun's key for a login, log in with it once, and return its public line.

    ssh asks for the login's password.
    """
    from gpurun.remote.ssh.openssh import install_key

    public = make_keys(home.keys / "ssh").client_public
    with _refuse_lost_connection():
        host_key, trusted = _trust_shown_key(
            login, scan_host_key(login.host, login.port, clock, SCAN_S), home, login.host
        )
        say(f"The host key of {login.host} {_TRUST[trusted]}: {fingerprint(host_key)}.")
        install_key(login.address, host_key, public)
        box = Box(target=str(login), identity=str(home.keys / "ssh" / "client"), host_key=host_key, trusted=trusted)
        machine = make_box_machine(box, ".", clock)
        try:
            machine.call(["true"], timeout_s=ANSWER_S)
        finally:
            machine.close()
    return public


class LoginOverSsh:
    """A cluster's login node over SSH (`core.cluster.LoginNode`). It connects when it is first used."""

    def __init__(self, cluster: Cluster, home: Home, clock: Clock, *, asks: bool = False) -> None:
        self._cluster, self._home, self._clock, self._asks = cluster, home, clock, asks
        self._kept: RemoteMachine | None = None

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float = 60.0) -> LoginNodeResult:
        """See `LoginNode.run`."""
        try:
            self._kept = self._kept or _connect_to_login_node(
                self._cluster, self._cluster.workdir, self._home, self._clock, asks=self._asks
            )
            reply = self._kept.call(argv, stdin=[stdin], timeout_s=timeout_s)
        except (MachineLost, FarRefusal) as lost:
            hint = lost.hint
            if lost.code == "machine.lost":
                hint = f"See that `ssh {self._cluster.host}` leads there. "
                hint += 'An entry of ~/.ssh/config is reached with transport = "openssh" in its table.'
            raise NoAnswer(lost.what.rstrip("."), hint=hint) from lost
        return LoginNodeResult(
            reply.exit_code, reply.stdout.decode("utf-8", "replace"), reply.stderr.decode("utf-8", "replace")
        )


class LoginHere:
    """A cluster whose login node is this computer, which has sbatch."""

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float = 60.0) -> LoginNodeResult:
        """See `LoginNode.run`."""
        try:
            result = subprocess.run(
                list(argv),
                input=stdin,
                env=child_environment(),
                capture_output=True,
                timeout=timeout_s,
                cwd="/",
                check=False,
            )
        except FileNotFoundError:
            return LoginNodeResult(127, "", f"there is no {argv[0]} here")
        except (subprocess.TimeoutExpired, OSError) as error:
            raise NoAnswer(f"{argv[0]} did not end here: {error_words(error)}") from error
        return LoginNodeResult(
            result.returncode, result.stdout.decode("utf-8", "replace"), result.stderr.decode("utf-8", "replace")
        )


def login_to(cluster: Cluster, home: Home, clock: Clock, *, asks: bool = False) -> LoginNode:
    """Return the connection to a cluster's login node, which is not open yet. For `asks` see `reach_box`."""
    return LoginHere() if cluster.is_here else LoginOverSsh(cluster, home, clock, asks=asks)


def folder_machine(cluster: Cluster, folder: str, token: str, home: Home, clock: Clock, last_mono: float) -> Machine:
    """Return the connection to a folder of a cluster through its login node. A job may or may not run in it."""
    if cluster.is_here:
        return LocalMachine(Path(folder), token=token)
    return _connect_to_login_node(cluster, folder, home, clock, last_mono)


def job_machine(
    cluster: Cluster, folder: str, token: str, home: Home, clock: Clock, last_mono: float = inf
) -> JobMachine:
    """Return the connection to a job through its folder. The connection is not open yet."""
    return JobMachine(lambda: folder_machine(cluster, folder, token, home, clock, last_mono))


def job_step(cluster: Cluster, instance: Instance, home: Home, clock: Clock) -> JobStep:
    """Return the connection to a job that writes nothing to the shared disk. The connection is not open yet."""
    folder = instance.address.folder if instance.address is not None else cluster.workdir
    find = partial(folder_machine, cluster, folder, instance.token, home, clock, inf)
    return JobStep(find, instance.id.rpartition("/")[2], folder, cluster.setup)


def _connect_to_login_node(
    cluster: Cluster, folder: str, home: Home, clock: Clock, last_mono: float = inf, *, asks: bool = False
) -> RemoteMachine:
    """Return the connection to a folder of a cluster's login node.

    The expected host key is that in config.toml, or else the key that was seen at the first use.
    """
    entry = cluster.host if cluster.transport else ""
    if entry and _read_ssh_entry(entry) is None:
        what = f"~/.ssh/config has no entry {entry}, which [slurm.{cluster.name}] names with its transport."
        hint = f"Write the entry (`ssh -G {entry}` shows what it has), or name host and user without transport."
        raise UsageError("config.slurm", what, hint=hint)
    login = login_of(entry) if entry else Login(cluster.user, cluster.host, cluster.port)
    request = Request(recipe="", host=entry, host_key=cluster.host_key, identity=cluster.identity, jump=cluster.jump)
    box, _ = _settle_login(request, login, home, clock, asks=asks)
    return make_box_machine(box, folder, clock, last_mono, asks=asks)


def _settle_login(
    request: Request, login: Login, home: Home, clock: Clock, *, asks: bool = False
) -> tuple[Box, list[str]]:
    """Return how to log in to a box, with the host key to expect, and notes about that for the plan."""
    from gpurun.remote.ssh.connection import identities

    entry = _read_ssh_entry(request.host, request.identity)
    if entry is not None:
        return _settle_entry_login(request, entry, login, home, asks=asks)
    identity = _choose_identity(request, login, home)
    with identities(identity):  # An unusable key is refused before any machine is contacted.
        pass
    way, notes = _resolve_jump_host(request, home, clock)
    host_key, trusted = _choose_host_key(request, login, identity, way, home, clock)
    notes.append(f"Its host key {_TRUST[trusted]}: {fingerprint(host_key)}.")
    found = {"identity": identity, "host_key": host_key, "python": request.python, **way}
    return Box(target=str(login), trusted=trusted, **found), notes


def _read_ssh_entry(host: str, identity: str = "") -> Entry | None:
    """Return the ~/.ssh/config entry called `host`; None if `host` is user@host or has no entry."""
    from gpurun.remote.ssh.openssh import NAME, read_entry

    return read_entry(host, "" if identity == AGENT else identity) if NAME.fullmatch(host) else None


def _settle_entry_login(
    request: Request, entry: Entry, login: Login, home: Home, *, asks: bool
) -> tuple[Box, list[str]]:
    """Return how the user's own ssh logs in to an entry of ~/.ssh/config, in the form that `_settle_login` returns."""
    from gpurun.remote.ssh.openssh import scan_entry

    if request.jump:
        what = f"--jump is for user@host; {entry.name} is an entry of ~/.ssh/config."
        raise UsageError("jump.unused", what, hint="Leave it out, and give the entry a ProxyJump.")
    identity = "" if request.identity in ("", AGENT) else _choose_identity(request, login, home)
    shown = scan_entry(entry, asks=asks)
    trusted: Trust = "given"
    if not request.host_key:
        # The same private address behind another proxy is a different box.
        shown, trusted = _trust_shown_key(
            login, shown, home, f"{login.host} by {entry.name}" if entry.is_by_proxy else login.host
        )
    elif fingerprint(shown) != fingerprint(request.host_key):
        raise HostKeyMismatch(entry.name, fingerprint(request.host_key), fingerprint(shown))
    notes = [
        f"Your own ssh logs in, with the entry {entry.name} of ~/.ssh/config: {login}"
        + (" through its proxy." if entry.is_by_proxy else "."),
        f"Its host key {_TRUST[trusted]}: {fingerprint(shown)}.",
    ]
    found = {"identity": identity, "host_key": shown, "python": request.python, "entry": entry.name}
    found |= {"jump": entry.name} if entry.is_by_proxy else {}
    return Box(target=str(login), trusted=trusted, **found), notes


def _make_jump(login: str, host_key: str) -> Jump | None:
    return Jump(parse_host(login).address, ExpectedKey.parse(host_key)) if login else None


@contextmanager
def _refuse_lost_connection(login: Login | None = None) -> Iterator[None]:
    """Turn a lost connection into a SetupError: this machine is not booting, so a retry would not help.

    `login` is the login that uses gpurun's own key, if it does; the hint then names `gpurun auth ssh`.
    """
    try:
        yield
    except MachineLost as lost:
        if lost.code == "ssh.not_let_in" and login is not None:
            hint = f"If it has a password, this installs gpurun's key: gpurun auth ssh {login}\n{lost.hint}"
            raise SetupError(lost.code, lost.what, hint=hint) from lost
        if lost.code != "machine.lost":
            raise SetupError(lost.code, lost.what, hint=lost.hint) from lost
        hint = "Check the host and the port, and that the machine is up: ssh -p PORT USER@HOST."
        raise SetupError("host.unreachable", lost.what, hint=hint) from lost


def _choose_identity(request: Request, login: Login, home: Home) -> str:
    """Return the key to log in with: the named file, AGENT, or gpurun's own key, which is created at its first use.

    Raise SetupError when gpurun's own key was just created, because no box has it yet.
    """
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
            hint=f"Where it has a password: gpurun auth ssh {request.host or login}. Else add this line to "
            "~/.ssh/authorized_keys there (or name a key of yours: --identity FILE, of a cluster `identity` in its "
            f"table). Then run it again.\n{public}",
        )
    return str(folder / "client")


def _resolve_jump_host(request: Request, home: Home, clock: Clock) -> tuple[dict[str, str], list[str]]:
    """Return the fields of a Box about the jump host, if there is one, and a note about it for the plan."""
    if not request.jump:
        return {}, []
    login = parse_host(request.jump, name="--jump")
    host_key, trusted = _trust_shown_key(login, scan_host_key(login.host, login.port, clock, SCAN_S), home, login.host)
    note = f"The host key of {login.host}, on the way there, {_TRUST[trusted]}: {fingerprint(host_key)}."
    return {"jump": str(login), "jump_host_key": host_key}, [note]


def _choose_host_key(
    request: Request, login: Login, identity: str, way: Mapping[str, str], home: Home, clock: Clock
) -> tuple[str, Trust]:
    """Return the host key to expect of the box, and why it is trusted."""
    if request.host_key:
        return request.host_key, "given"
    if not way:
        return _trust_shown_key(login, scan_host_key(login.host, login.port, clock, SCAN_S), home, login.host)
    jump = _make_jump(way["jump"], way["jump_host_key"])
    shown = scan_host_key(login.host, login.port, clock, SCAN_S, key=identity, jump=jump)
    # The same private address behind another jump host is a different box.
    return _trust_shown_key(login, shown, home, f"{login.host} by {way['jump']}")


def _trust_shown_key(login: Login, shown: str, home: Home, name: str) -> tuple[str, Trust]:
    """Return the host key that is shown, and why it is trusted. A key shown for the first time is recorded.

    Raise SetupError if the key differs from the recorded one.
    """
    known = find_host_key(home, name, login.port)
    if known is None:
        remember_host(home, name, login.port, shown)
        return shown, "first use"
    if known.split()[:2] != shown.split()[:2]:
        now, then = fingerprint(shown), fingerprint(known)
        raise SetupError(
            "ssh.host_key_changed",
            f"{login.host} shows another host key than before: {now}, not {then}.",
            hint="If the machine was reinstalled, give its new key: --host-key SHA256:… (for a --jump, remove its "
            "line from known_hosts.json in gpurun's home). Otherwise it is another machine.",
        )
    return shown, "known"


def _read_box_facts(box: Box, login: Login, clock: Clock, say: Callable[[str], None], *, asks: bool) -> MachineFacts:
    """Return the facts that the box reports, as a run would read them, through a folder that is then removed.

    Raise SetupError if the box does not run Python.
    """
    machine = make_box_machine(box, f".gpurun/look-{secrets.token_hex(4)}", clock, asks=asks)
    try:
        reply = machine.call(["sh", "-c", _ANSWER, "gpurun", python_of(box)], timeout_s=ANSWER_S)
        try:
            if reply.exit_code:
                words = last_words(reply.stderr)
                what = f"{login} has no {python_of(box)} of 3.8 or newer" + (f": {words}." if words else ".")
                raise SetupError("box.no_python", what, hint="Name the one that has torch: --python PATH.")
            far = FarSide(machine, python=python_of(box))
            far.install_agent()
            return far.hello(on_wait=lambda seconds, words: say(f"The box has been checked for {seconds} s: {words}"))
        finally:
            with suppress(MachineLost):
                machine.call(["sh", "-c", _AWAY], timeout_s=ANSWER_S)
    finally:
        machine.close()


def _describe_facts(facts: MachineFacts) -> str:
    """Return a phrase about what a box has, for a plan."""
    cards = Counter((card.name, card.memory_bytes or 0) for card in facts.torch.devices or facts.gpus)
    parts = [f"{count}×{safe_line(name)} {format_bytes(size)}" for (name, size), count in cards.items()] or ["no GPU"]
    torch = facts.torch
    made_for = f" for CUDA {safe_line(torch.built_for)}" if torch.built_for else ""
    parts.append(
        f"torch {safe_line(torch.version or '?')}{made_for}" if torch.found else "no Python that imports torch"
    )
    return ", ".join([*parts, f"Python {safe_line(facts.python)}"])
