"""Observes whether a job still works: since when it has written nothing, and since when nothing was busy.

A job is silent if it writes neither log lines nor files. A hung collective operation is silent although its GPUs show
100 %. A job is idle if it is silent, no GPU and no core is busy and, on a dev box, no user works. The watchdog decides
what follows from these observations.
"""

from __future__ import annotations

import os
import stat
import threading
import time

from gpurun.remote.agent.processes import trainers
from gpurun.remote.agent.system import path_in, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterable, Optional, Set, Tuple

    from gpurun.remote.agent.gpu_use import GpuWatcher
    from gpurun.remote.agent.people import People
    from gpurun.remote.agent.system import Json

LOOK_S, QUIET_S = 15.0, 600.0
"""The seconds between checks, and the seconds without output after which a job counts as silent."""
PEOPLE_LOOK_S, WARN_S = 5.0, 300.0
"""The seconds between checks of a dev box, and how many seconds before its end its users are warned."""
MOST_LOOKING = 20
"""After a slow check, for example of a million files, the pause is this many times as long as the check."""
BUSY_PERCENT, BUSY_SHARE = 5, 0.05
"""A GPU is busy above this use in percent, and the processes if all together use more than this share of a core."""
OURS = ("status.json", "MANIFEST.json", "outputs")
"""Files that gpurun itself writes into out/, whether or not the job works."""
PASSED_OVER = frozenset(("wandb", ".git", ".venv", "node_modules", "__pycache__"))
"""Folders whose changes are not a sign of work: the job itself does not write to them (wandb logs every 15 s)."""
WATCHES = b"nvidia-smi"
"""Programs that read the GPUs, including the agent's own, do not count as work."""


class Activity:
    """Watches a job in a separate thread, because a check of a network disk may hang and must not block the watchdog.

    `silent_since_wall` is when the job wrote last, if that is long ago. `end` is called once, with "idle" or "silent",
    when the job has been idle or silent for as long as its order allows (`idle_s`, `silent_s`; 0 or missing means
    forever). On a dev box (`people` then counts the users' sessions) the job never counts as silent. `idle_at_wall` is
    when the box will be ended, if that is soon; open terminals are then warned.
    """

    def __init__(self, root: str, job: Json, gpus: GpuWatcher, end: Callable[[str], None]) -> None:
        self.root, self.gpus, self.end = root, gpus, end
        self.limits = {"idle": job.get("idle_s") or 0.0, "silent": job.get("silent_s") or 0.0}
        # gpurun's runner starts a command and looks for outputs. That work does not count as the job's.
        self.has_runner = bool(job.get("runner"))
        shortest = min([QUIET_S * 2, *(limit for limit in self.limits.values() if limit)])
        attended = job.get("attended")
        self.quiet_s, self.look_s = shortest / 2, min(PEOPLE_LOOK_S if attended else LOOK_S, shortest / 8)
        self.silent_since_wall: Optional[float] = None
        self.idle_at_wall: Optional[float] = None
        self.run = str(job.get("run"))
        self.people: Optional[People] = None
        if attended and os.path.isdir("/proc/self"):
            from gpurun.remote.agent.people import People

            self.people = People(root, attended == "machine", self.limits["idle"])
        # Not the lease's clock, because a job does not work while its laptop sleeps.
        self.wrote_s = self.worked_s = self.looked_s = time.monotonic()
        self.traces: Optional[Tuple[int, ...]] = None
        self.cpu_s: Optional[float] = None

    def begin(self, pid: int) -> None:
        """Check repeatedly from now on, until this process ends. `pid` is the job's first process."""
        threading.Thread(target=self.watch, args=(pid,), daemon=True).start()

    def watch(self, pid: int) -> None:
        """Check repeatedly. A check that fails is logged and tried again."""
        is_warned = False
        while True:
            began_s = time.monotonic()
            try:
                reason = self.look(pid)
                if reason and not is_warned:
                    is_warned = True
                    self.end(reason)
            except (OSError, ValueError) as error:
                say("the job's activity could not be checked: %s" % error)
            time.sleep(max(self.look_s, MOST_LOOKING * (time.monotonic() - began_s)))

    def look(self, pid: int) -> str:
        """Check once. Return "idle" or "silent" if the job has been that for too long, else ""."""
        pids, now_s = trainers(self.root), time.monotonic()
        traces = traces_of(self.root, pids)
        has_written, self.traces = traces != self.traces, traces
        is_used, used_s = self.people.look(pids, pid) if self.people else (False, self.used_since(pids, pid))
        # A job that cannot be observed (without /proc) does not count as idle.
        is_busy = used_s is None or used_s > BUSY_SHARE * (now_s - self.looked_s)
        is_busy = is_busy or any((card["use_percent"] or 0) > BUSY_PERCENT for card in self.gpus.now())
        self.looked_s = now_s
        if has_written:
            self.wrote_s = now_s
        if has_written or is_busy or is_used:
            self.worked_s = now_s
        if self.people:
            return self.idle_soon(self.people, now_s - self.worked_s)
        silent_s = now_s - self.wrote_s
        if silent_s < self.quiet_s:
            self.silent_since_wall = None
        elif self.silent_since_wall is None:
            self.silent_since_wall = time.time() - silent_s
        for reason, lasted_s in (("idle", now_s - self.worked_s), ("silent", silent_s)):
            if 0 < self.limits[reason] <= lasted_s:
                return reason
        return ""

    def used_since(self, pids: Set[int], pid: int) -> Optional[float]:
        """Return the CPU seconds that the job's processes used since the last check; None if they are not known."""
        now_s = cpu_seconds(pids, pid if self.has_runner else 0)
        before_s, self.cpu_s = self.cpu_s, now_s
        return None if now_s is None or before_s is None else now_s - before_s

    def idle_soon(self, people: People, idle_s: float) -> str:
        """Warn users that the machine ends soon because it seems unused. Return "idle" once the time is over."""
        limit_s = self.limits["idle"]
        left_s = limit_s - idle_s
        if not limit_s or left_s > min(WARN_S, limit_s / 2):
            self.idle_at_wall = None
        elif self.idle_at_wall is None:
            self.idle_at_wall = time.time() + left_s
            when = time.strftime("%H:%M:%S", time.localtime(self.idle_at_wall))
            people.say(
                "gpurun: %s is idle and ends at %s, after its files are downloaded; press a key to keep it."
                % (self.run, when)
            )
        return "idle" if 0 < limit_s <= idle_s else ""


def traces_of(root: str, pids: Iterable[int]) -> Tuple[int, ...]:
    """Return figures that change when the job writes: count, bytes and times of its files, bytes of its open files.

    The open files also show a download that goes to a cache in another folder.
    """
    count = size = times = 0
    folders = [path_in(root, "bundle"), path_in(root, "out")]
    while folders:
        folder = folders.pop()
        for entry in entries_of(folder):
            if entry.name in PASSED_OVER or (folder == path_in(root, "out") and entry.name.startswith(OURS)):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                facts = entry.stat(follow_symlinks=False)
            except OSError:  # The entry was removed in the meantime.
                continue
            count, size, times = count + 1, size + facts.st_size, times + facts.st_mtime_ns
    return count, size, times, sum(open_bytes(pid) for pid in pids)


def entries_of(folder: str) -> Iterable[os.DirEntry[str]]:
    """Return the entries of a folder; none if the folder is gone or unreadable."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return ()


def open_bytes(pid: int) -> int:
    """Return the total size of the files that a process has open, except those of a tracker."""
    total = 0
    for entry in entries_of("/proc/%d/fd" % pid):
        try:
            facts = os.stat(entry.path)
            if stat.S_ISREG(facts.st_mode) and not PASSED_OVER & set(os.readlink(entry.path).split("/")):
                total += facts.st_size
        except OSError:
            continue
    return total


def cpu_seconds(pids: Set[int], runner: int) -> Optional[float]:
    """Return the CPU seconds of processes and of their ended children; of the `runner`, only those of its children.

    Return None if none of the processes can be observed.
    """
    ticks, seen = 0, False
    for pid in pids:
        try:
            with open("/proc/%d/stat" % pid, "rb") as file:
                name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        except OSError:
            continue
        seen = True
        if name != WATCHES:
            own, children = rest.split()[11:13], rest.split()[13:15]
            ticks += sum(int(part) for part in (children if pid == runner else own + children))
    return ticks / os.sysconf("SC_CLK_TCK") if seen else None
