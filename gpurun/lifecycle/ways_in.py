"""Write SSH entries, so that a user can log in to the machines of unfinished runs.

`HOME/ssh/config` has an entry for each machine. A command that needs the file rewrites it completely from the journals,
and so does a supervisor when its run's machine appears, moves or ends. This module does not call a provider or change a
lease.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Flag
from threading import Thread

from gpurun.core.clock import Clock
from gpurun.core.cluster import cluster_of
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.filelock import exclusive
from gpurun.core.journal_records import Phase
from gpurun.core.paths import Home, RunFolder, make_private, write_atomic
from gpurun.core.places import place_facts
from gpurun.core.records import Address, Instance
from gpurun.core.run_plan import Box
from gpurun.core.settings import load_clusters
from gpurun.ledger.runs import Sight, look_at_all, look_at_run, planned_runs
from gpurun.planning.own_box import known_login, shown_host_key
from gpurun.providers.ssh_login import parse_host
from gpurun.remote.client import IN_IMAGE
from gpurun.remote.job_machine import step_argv
from gpurun.remote.key_pairs import fingerprint
from gpurun.remote.ssh.entry import HostEntry

LOOK_S = 2.0
_LIVE = (Phase.READY, Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED, Phase.COLLECTED, Phase.HELD)
_NOT_READY = (Phase.OPENED, Phase.CREATING, Phase.CREATED)
_HEAD = "# Written by gpurun, and rewritten when a machine appears, moves or ends: your own changes here are lost.\n"
# The job's image may not have the shell that $SHELL names.
_SHELL = ("sh", "-c", 'command -v "${SHELL:=/bin/sh}" >/dev/null || SHELL=/bin/sh; export SHELL; exec "$SHELL" -l')
# Start in the folder in which the job's command runs (the trainer has none). GPURUN_SHELL_OF lets the agent recognise a
# shell that has left the run's folder.
_IN_FOLDER = (
    'cd -- "$1" && shift && export GPURUN_SHELL_OF="$(pwd -P)" && '
    'if [ -d data ]; then export GPURUN_DATA="$PWD/data"; fi; '
    'if [ -d bundle/work ]; then cd bundle/work; fi; exec "$@"'
)

HostKeyOf = Callable[[str, Box], str]
"""Takes an alias and a box; returns the box's full public host key. The box itself may have only its fingerprint."""


@dataclass(frozen=True)
class WayIn:
    """How to log in to the machine of a run.

    `entry` is its SSH entry; None if the cluster's scheduler is on this computer. `folder` is the run's folder on the
    machine, and `job` the scheduler's job number. `setup` are shell lines, from the cluster's table, to run first.
    `into_image` is the program on the machine that enters the job's container image.
    """

    run: str
    entry: HostEntry | None
    folder: str
    job: str = ""
    setup: str = ""
    into_image: str = ""

    def command(self, argv: Sequence[str], *, at_terminal: bool) -> str:
        """Return the shell line for ssh that runs a program in the job's working directory.

        Without `argv`, the line starts a login shell.
        """
        words = words_there(self.folder, argv or _SHELL)
        if self.into_image:
            words = [self.into_image, *words]
        if self.job:
            words = [*step_argv(self.job, self.folder, self.setup, *(["--pty"] if at_terminal else [])), *words]
        return shlex.join(words)


def words_there(folder: str, argv: Sequence[str]) -> list[str]:
    """Return the argv that runs a program in the job's working directory; `folder` is the run's remote folder."""
    return ["sh", "-c", _IN_FOLDER, "gpurun", folder, *argv]


def alias_of(run: str) -> str:
    """Return the ssh alias for a run's machine."""
    return f"gpurun-{run}"


def way_into(sight: Sight, home: Home, host_key_of: HostKeyOf) -> WayIn:
    """Return how to log in to a run's machine. Raise UsageError if there is no machine to log in to."""
    run, state, instance = sight.folder.name, sight.state, sight.state.instance
    if not sight.unfinished or state.phase not in (*_LIVE, *_NOT_READY):
        going = "is over" if not sight.unfinished else "is at its end"
        hint = f"Its output is in {sight.folder.artifacts}; gpurun receipt {run} shows how it ended."
        raise UsageError("way.over", f"{run} {going}: there is no machine to log in to.", hint=hint)
    facts = place_facts(state.provider or sight.plan.offer.provider)
    address = instance.address if instance is not None else None
    if facts.is_here:
        hint = f"gpurun attach {run} shows it."
        if address is not None:
            hint = f"Its folder: cd {shlex.quote(str(home.root / address.folder))}"
        raise UsageError("way.here", f"{run} runs on this machine; no login is needed.", hint=hint)
    if instance is None or address is None or state.phase in _NOT_READY:
        hint = f"gpurun attach {run} shows its progress; run this again once the machine is ready."
        raise UsageError("way.not_ready", f"{run} has no machine to log in to yet.", hint=hint)
    if facts.is_queued:
        return _find_way_into_job(sight, instance, address, home, host_key_of)
    alias, folder = alias_of(run), f".gpurun/{instance.token}"
    if sight.plan.box is not None:
        return WayIn(run, _make_host_entry(alias, sight.plan.box, host_key_of), folder)
    key, host_key = sight.folder.ssh / "client", sight.folder.ssh / "host.pub"
    if not (key.is_file() and host_key.is_file()):
        hint = "The key is in the home that started the run: name that with --home."
        raise SetupError("way.no_key", f"The key that logs in to {run} is not in {sight.folder.ssh}.", hint=hint)
    line = " ".join(host_key.read_text(encoding="ascii").split()[:2])
    return WayIn(run, HostEntry(alias, address, str(key), line), folder)


def _find_way_into_job(sight: Sight, instance: Instance, address: Address, home: Home, host_key_of: HostKeyOf) -> WayIn:
    """Return how to log in to a cluster's job: through its login node, which also sees the run's folder."""
    run, folder = sight.folder.name, address.folder
    cluster = cluster_of(load_clusters(home), instance.region)
    entry = None if cluster.is_here else _make_host_entry(alias_of(run), known_login(cluster, home), host_key_of)
    into_image = f"{folder}/{IN_IMAGE}" if sight.plan.enters_image else ""
    return WayIn(run, entry, folder, instance.id.rpartition("/")[2], cluster.setup, into_image)


def _make_host_entry(alias: str, box: Box, host_key_of: HostKeyOf) -> HostEntry:
    if box.entry:
        what = f"You log in to this machine by your own entry {box.entry} in ~/.ssh/config."
        raise UsageError("way.own_entry", what, hint=f"ssh {box.entry}")
    jump = None
    if box.jump:
        way = parse_host(box.jump).address
        jump = HostEntry(f"{alias}.jump", way, box.identity, " ".join(box.jump_host_key.split()[:2]))
    host_key = box.host_key if len(box.host_key.split()) > 1 else host_key_of(alias, box)
    return HostEntry(alias, parse_host(box.target).address, box.identity, " ".join(host_key.split()[:2]), jump)


def config_of(home: Home) -> Path:
    """Return the path of the file with the entries."""
    return home.ssh / "config"


def write_entries(home: Home, clock: Clock | None = None) -> list[WayIn]:
    """Write an SSH entry for each machine that accepts a login; return how to log in to each.

    The home may have only the fingerprint of a box's host key. With a `clock`, connect to the box to get the key;
    without one, use only a key that was stored before.
    """
    make_private(home.ssh)
    known_hosts = home.ssh / "known_hosts"
    with exclusive(home.ssh / ".lock"):
        host_key_of = _host_key_lookup(_read_known_keys(known_hosts), clock)
        ways = list[WayIn]()
        for sight, _ in look_at_all(home, planned_runs(home, only_open=True)):
            with suppress(GpurunError, OSError):  # `way_to_run` reports these errors for the run it names.
                ways += [way_into(sight, home, host_key_of)] if sight else []
        entries = [way.entry for way in ways if way.entry is not None]
        _replace_if_changed(known_hosts, "".join(entry.known() for entry in entries))
        config = config_of(home)
        _replace_if_changed(config, "\n".join([_HEAD, *(entry.config(known_hosts, config) for entry in entries)]))
    return ways


def _replace_if_changed(path: Path, text: str) -> None:
    with suppress(OSError):
        if path.read_bytes() == text.encode():
            return
    write_atomic(path, text.encode())


def way_to_run(home: Home, run: str, clock: Clock) -> WayIn:
    """Write the entries, and return how to log in to one run's machine. Raise a GpurunError if that is not possible."""
    write_entries(home, clock)
    return way_into(look_at_run(home, run), home, _host_key_lookup(_read_known_keys(home.ssh / "known_hosts"), clock))


def _host_key_lookup(known: Mapping[str, str], clock: Clock | None) -> HostKeyOf:
    def host_key_of(alias: str, box: Box) -> str:
        line = known.get(alias, "")
        if line and box.host_key and fingerprint(line) == fingerprint(box.host_key):
            return line
        if clock is None or not box.host_key:
            hint = "gpurun doctor --online connects to it and stores its host key."
            raise SetupError("way.no_host_key", f"The host key of {box.target} is not on record here.", hint=hint)
        return shown_host_key(box, clock)

    return host_key_of


def _read_known_keys(path: Path) -> dict[str, str]:
    """Return the stored host keys by alias."""
    with suppress(OSError, UnicodeError):
        lines = [line.partition(" ") for line in path.read_text(encoding="ascii").splitlines()]
        return {alias: key for alias, _, key in lines}
    return {}


@contextmanager
def entries_kept(home: Home, folder: RunFolder) -> Iterator[None]:
    """Keep the SSH entries current while the block runs, on a separate thread.

    Nothing is written until a command has created the file with the entries.
    """
    over = Flag()

    def follow() -> None:
        before, is_last = None, False
        while not is_last:
            is_last = over.wait(LOOK_S)
            with suppress(GpurunError, OSError):
                facts = folder.journal.stat()
                if (facts.st_size, facts.st_mtime_ns) == before or not config_of(home).exists():
                    continue
                before = facts.st_size, facts.st_mtime_ns
                write_entries(home)

    thread = Thread(target=follow, name="ways in", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * LOOK_S)
