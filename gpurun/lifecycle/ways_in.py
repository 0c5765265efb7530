"""SSH entries for the machines of runs under way, for use beside their supervisors.

`HOME/ssh/config` has an entry for each. The file is rewritten as a whole from the journals, by a command that needs it
and by the supervisor of a run whose machine came, moved or went. Nothing here calls a provider or touches a lease.
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
from gpurun.remote.job_machine import step_argv
from gpurun.remote.key_pairs import fingerprint
from gpurun.remote.ssh.entry import HostEntry

LOOK_S = 2.0
_LIVE = (Phase.READY, Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED, Phase.COLLECTED, Phase.HELD)
_BEFORE = (Phase.OPENED, Phase.CREATING, Phase.CREATED)
_HEAD = "# Made by gpurun, and rewritten whenever a run's machine comes, moves or goes: changes made here are lost.\n"
_SHELL = ("sh", "-c", 'exec "${SHELL:-/bin/sh}" -l')
# A command works in the job's folder; a trainer has no such folder.
_THERE = (
    'cd -- "$1" && shift && if [ -d data ]; then export GPURUN_DATA="$PWD/data"; fi; '
    'if [ -d bundle/work ]; then cd bundle/work; fi; exec "$@"'
)

HostKeyOf = Callable[[str, Box], str]
"""Return the public line of a box's host key, by its alias and the box; the record has only the fingerprint."""


@dataclass(frozen=True)
class WayIn:
    """How to log in to the machine of a run; `entry` is None if its scheduler is on this machine.

    `folder` is the run's own on that machine; `job` the number of a scheduler's job; `setup` the cluster's lines that
    come first.
    """

    run: str
    entry: HostEntry | None
    folder: str
    job: str = ""
    setup: str = ""

    def command(self, argv: Sequence[str], *, at_terminal: bool) -> str:
        """Return the shell line that runs a program in the run's folder, or a login shell if `argv` is empty."""
        words = ["sh", "-c", _THERE, "gpurun", self.folder, *(argv or _SHELL)]
        if self.job:
            words = [*step_argv(self.job, self.folder, self.setup, *(["--pty"] if at_terminal else [])), *words]
        return shlex.join(words)


def alias_of(run: str) -> str:
    """Return the name of a run's machine for ssh."""
    return f"gpurun-{run}"


def way_into(sight: Sight, home: Home, host_key_of: HostKeyOf) -> WayIn:
    """Return the way into a run's machine; UsageError if there is none, with what to do."""
    run, state, instance = sight.folder.name, sight.state, sight.state.instance
    if not sight.unfinished or state.phase not in (*_LIVE, *_BEFORE):
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
    if instance is None or address is None or state.phase in _BEFORE:
        hint = f"gpurun attach {run} shows its progress; run this again once the machine is ready."
        raise UsageError("way.not_ready", f"{run} has no machine to log in to yet.", hint=hint)
    if facts.is_queued:
        return _into_job(run, instance, address, home, host_key_of)
    alias, folder = alias_of(run), f".gpurun/{instance.token}"
    if sight.plan.box is not None:
        return WayIn(run, _entry_of(alias, sight.plan.box, host_key_of), folder)
    key, host_key = sight.folder.ssh / "client", sight.folder.ssh / "host.pub"
    if not (key.is_file() and host_key.is_file()):
        hint = "The key is in the home that started the run: name that with --home."
        raise SetupError("way.no_key", f"The key that logs in to {run} is not in {sight.folder.ssh}.", hint=hint)
    line = " ".join(host_key.read_text(encoding="ascii").split()[:2])
    return WayIn(run, HostEntry(alias, address, str(key), line), folder)


def _into_job(run: str, instance: Instance, address: Address, home: Home, host_key_of: HostKeyOf) -> WayIn:
    """Return the way into a job, by its cluster's login node, which sees the run's folder too."""
    cluster = cluster_of(load_clusters(home), instance.region)
    entry = None if cluster.is_here else _entry_of(alias_of(run), known_login(cluster, home), host_key_of)
    return WayIn(run, entry, address.folder, instance.id.rpartition("/")[2], cluster.setup)


def _entry_of(alias: str, box: Box, host_key_of: HostKeyOf) -> HostEntry:
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
    """Write the entry of each machine that can be logged in to, and return these ways.

    With a `clock`, a box whose host key is known only by its fingerprint is connected to for the key. Without one, only
    a key that it showed before is used.
    """
    make_private(home.ssh)
    known_hosts = home.ssh / "known_hosts"
    with exclusive(home.ssh / ".lock"):
        host_key_of = _before(_known(known_hosts), clock)
        ways = list[WayIn]()
        for sight, _ in look_at_all(home, planned_runs(home, only_open=True)):
            with suppress(GpurunError, OSError):  # `way_to_run` reports these errors for the run it names.
                ways += [way_into(sight, home, host_key_of)] if sight else []
        entries = [way.entry for way in ways if way.entry is not None]
        _replace(known_hosts, "".join(entry.known() for entry in entries))
        _replace(config_of(home), "\n".join([_HEAD, *(entry.config(known_hosts) for entry in entries)]))
    return ways


def _replace(path: Path, text: str) -> None:
    with suppress(OSError):
        if path.read_bytes() == text.encode():
            return
    write_atomic(path, text.encode())


def way_to_run(home: Home, run: str, clock: Clock) -> WayIn:
    """Return the way into the machine of one run, once its entry is written; an error if there is none."""
    write_entries(home, clock)
    return way_into(look_at_run(home, run), home, _before(_known(home.ssh / "known_hosts"), clock))


def _before(known: Mapping[str, str], clock: Clock | None) -> HostKeyOf:
    def host_key_of(alias: str, box: Box) -> str:
        line = known.get(alias, "")
        if line and box.host_key and fingerprint(line) == fingerprint(box.host_key):
            return line
        if clock is None or not box.host_key:
            hint = "gpurun doctor --online connects to it and stores its host key."
            raise SetupError("way.no_host_key", f"The host key of {box.target} is not on record here.", hint=hint)
        return shown_host_key(box, clock)

    return host_key_of


def _known(path: Path) -> dict[str, str]:
    """Return the host keys that are on file, by alias."""
    with suppress(OSError, UnicodeError):
        lines = [line.partition(" ") for line in path.read_text(encoding="ascii").splitlines()]
        return {alias: key for alias, _, key in lines}
    return {}


@contextmanager
def entries_kept(home: Home, folder: RunFolder) -> Iterator[None]:
    """Keep the entries current while a run is driven, on a thread of its own that blocks nothing.

    Only if the file with the entries exists, so once a user has requested it.
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
