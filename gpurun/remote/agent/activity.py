"""Whether a job still works: since when it has written nothing, and since when nothing was busy.

A job is silent if it writes neither log lines nor files; a stuck collective is silent although its GPUs show 100 %. It
is idle if it is silent, no GPU and no core is busy and, on a dev box, no person works there. Both
are observations; the watchdog decides what follows from them.
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
"""The seconds between checks, and the seconds without output after which a job is called silent."""
PEOPLE_LOOK_S, WARN_S = 5.0, 300.0
"""The seconds between checks of a dev box, and how many seconds before its end people are warned."""
MOST_LOOKING = 20
"""After a slow check, for example of a million files, the pause is this many times the check's duration."""
BUSY_PERCENT, BUSY_SHARE = 5, 0.05
"""A GPU is busy above this use in percent; the processes are busy above this share of one core, all together."""
OURS = ("status.json", "MANIFEST.json", "outputs")
"""Files that gpurun itself writes into out/, whether or not the job does anything."""
PASSED_OVER = frozenset(("wandb", ".git", ".venv", "node_modules", "__pycache__"))
"""Folders whose changes are not a sign of work: only helpers (wandb logs every 15 s) or nothing write there."""
WATCHES = b"nvidia-smi"
"""Programs that read the GPUs do not count as work, including the agent's own."""


class Activity:
    """Watches a job in a separate thread, because a network disk may block a check and must not block the watchdog.

    `silent_since_wall` is when the job wrote last, if that is long ago. `end` is called once, with "idle" or
    "silent", when the job has been that for as long as its order allows (`idle_s`, `silent_s`; 0 or missing: forever).
    On a dev box, where `people` work, the job is never called silent: `idle_at_wall` is when the box will be ended,
    if that is soon, and open terminals are warned.
    """

    def __init__(self, root: str, job: Json, gpus: GpuWatcher, end: Callable[[str], None]) -> None:
        self.root, self.gpus, self.end = root, gpus, end
        self.limits = {"idle": job.get("idle_s") or 0.0, "silent": job.get("silent_s") or 0.0}
        # gpurun's runner starts a command and looks for outputs: its own work is not the job's.
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
        # Not the lease's clock: while a laptop sleeps, its job does not work.
        self.wrote_s = self.worked_s = self.looked_s = time.monotonic()
        self.traces: Optional[Tuple[int, ...]] = None
        self.cpu_s: Optional[float] = None

    def begin(self, pid: int) -> None:
        """Check from now on, until this process ends; `pid` is the job's first process."""
        threading.Thread(target=self.watch, args=(pid,), daemon=True).start()

    def watch(self, pid: int) -> None:
        """Check repeatedly; log a check that fails, and try again at the next one."""
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
        """Check once: return "idle" or "silent" if the job has been that for too long, else ""."""
        pids, now_s = trainers(self.root), time.monotonic()
        traces = traces_of(self.root, pids)
        has_written, self.traces = traces != self.traces, traces
        is_used, used_s = self.people.look(pids, pid) if self.people else (False, self.used_since(pids, pid))
        # A job that cannot be observed (there is no /proc) is not called idle.
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
        """Return the CPU seconds of the job's processes since the last check; None at the first check."""
        now_s = cpu_seconds(pids, pid if self.has_runner else 0)
        before_s, self.cpu_s = self.cpu_s, now_s
        return None if now_s is None or before_s is None else now_s - before_s

    def idle_soon(self, people: People, idle_s: float) -> str:
        """Warn people that the machine ends soon because it seems unused; return "idle" when the time has come."""
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
    """Return values that change when the job writes: number, bytes and times of its files, and bytes of its open files.

    The open files also reveal a download that goes to a cache elsewhere.
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
            except OSError:  # Removed in the meantime.
                continue
            count, size, times = count + 1, size + facts.st_size, times + facts.st_mtime_ns
    return count, size, times, sum(open_bytes(pid) for pid in pids)


def entries_of(folder: str) -> Iterable[os.DirEntry[str]]:
    """Return the entries of a folder; none if it is gone or unreadable."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return ()


def open_bytes(pid: int) -> int:
    """Return the bytes of all files that a process has open, except a tracker's own."""
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
    """Return the CPU seconds of processes and of their ended children; for the `runner` only those of its children.

    None if none of them can be observed.
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
