"""Whether a job still works, whatever it is: since when it has written nothing, and since when nothing has worked.

Silent is a job that writes neither a log line nor a file; a stuck collective is that while its cards show 100 %. Idle
is one that is silent while no card and no core does anything either, and at which nobody works, where people may. Both
are observations; what follows from them is the watchdog's part.
"""

from __future__ import annotations

import os
import stat
import threading
import time

from gpurun.remote.agent.processes import trainers
from gpurun.remote.agent.system import at, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterable, Optional, Set, Tuple

    from gpurun.remote.agent.gpu_use import GpuWatcher
    from gpurun.remote.agent.people import People
    from gpurun.remote.agent.system import Json

LOOK_S, QUIET_S = 15.0, 600.0
"""How often it looks, and after how long without a word a job is called silent."""
PEOPLE_LOOK_S, WARN_S = 5.0, 300.0
"""How often it looks where people work, and how long before its end they are told."""
MOST_LOOKING = 20
"""A look at a million files is followed by a pause of so many times what it took."""
BUSY_PERCENT, BUSY_SHARE = 5, 0.05
"""A card above this, or all processes together above this share of a core, is at work."""
OURS = ("status.json", "MANIFEST.json", "outputs")
"""What gpurun itself writes into out/ whether the job does anything or not."""
PASSED_OVER = frozenset(("wandb", ".git", ".venv", "node_modules", "__pycache__"))
"""Folders in which a helper writes on its own (wandb logs the machine's load every 15 s), or in which nobody writes."""
WATCHES = b"nvidia-smi"
"""A program that looks at the cards is not work, be it the agent's own."""


class Activity:
    """Looks in a thread of its own: a network disk may hold a look, and must not hold the watchdog.

    `silent_since_wall` is when the job wrote last, once that is long ago. `end` is called once, with "idle" or
    "silent", when the job has been so for as long as its order allows (`idle_s`, `silent_s`; 0 or none: for ever).
    Where `people` work at it, it is never called silent: `idle_at_wall` is when it will be ended, once that is soon,
    and their terminals are told.
    """

    def __init__(self, root: str, job: Json, gpus: GpuWatcher, end: Callable[[str], None]) -> None:
        self.root, self.gpus, self.end = root, gpus, end
        self.limits = {"idle": job.get("idle_s") or 0.0, "silent": job.get("silent_s") or 0.0}
        # A command is started by gpurun's runner, which looks for outputs: its own work is not the job's.
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
        # Not the clock of the lease: while a laptop sleeps, its job does not work.
        self.wrote_s = self.worked_s = self.looked_s = time.monotonic()
        self.traces: Optional[Tuple[int, ...]] = None
        self.cpu_s: Optional[float] = None

    def begin(self, pid: int) -> None:
        """Look from now on, until this process ends; `pid` is the job's first process."""
        threading.Thread(target=self.watch, args=(pid,), daemon=True).start()

    def watch(self, pid: int) -> None:
        """Look again and again; what one look could not see, the next one may."""
        is_told = False
        while True:
            began_s = time.monotonic()
            try:
                reason = self.look(pid)
                if reason and not is_told:
                    is_told = True
                    self.end(reason)
            except (OSError, ValueError) as error:
                say("the job's activity was not seen: %s" % error)
            time.sleep(max(self.look_s, MOST_LOOKING * (time.monotonic() - began_s)))

    def look(self, pid: int) -> str:
        """Look once: "idle" or "silent" where the job has been that for too long, else nothing."""
        pids, now_s = trainers(self.root), time.monotonic()
        traces = traces_of(self.root, pids)
        has_written, self.traces = traces != self.traces, traces
        is_used, used_s = self.people.look(pids, pid) if self.people else (False, self.used_since(pids, pid))
        # What cannot be seen (there is no /proc) is not called idle.
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
        """The CPU seconds of the job's processes since the last look; None where that was not seen twice."""
        now_s = cpu_seconds(pids, pid if self.has_runner else 0)
        before_s, self.cpu_s = self.cpu_s, now_s
        return None if now_s is None or before_s is None else now_s - before_s

    def idle_soon(self, people: People, idle_s: float) -> str:
        """Tell people that it is ended soon, as nobody seems to work; "idle" once it is time."""
        limit_s = self.limits["idle"]
        left_s = limit_s - idle_s
        if not limit_s or left_s > min(WARN_S, limit_s / 2):
            self.idle_at_wall = None
        elif self.idle_at_wall is None:
            self.idle_at_wall = time.time() + left_s
            when = time.strftime("%H:%M:%S", time.localtime(self.idle_at_wall))
            people.say("gpurun: %s is idle and ends at %s, its files at home; a key keeps it." % (self.run, when))
        return "idle" if 0 < limit_s <= idle_s else ""


def traces_of(root: str, pids: Iterable[int]) -> Tuple[int, ...]:
    """What changes when the job writes: how many files its folders have, their bytes and times, its open files' bytes.

    By the open files a download is seen, too, that goes to a cache elsewhere.
    """
    count = size = times = 0
    folders = [at(root, "bundle"), at(root, "out")]
    while folders:
        folder = folders.pop()
        for entry in entries_of(folder):
            if entry.name in PASSED_OVER or (folder == at(root, "out") and entry.name.startswith(OURS)):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                facts = entry.stat(follow_symlinks=False)
            except OSError:  # It was removed meanwhile.
                continue
            count, size, times = count + 1, size + facts.st_size, times + facts.st_mtime_ns
    return count, size, times, sum(open_bytes(pid) for pid in pids)


def entries_of(folder: str) -> Iterable[os.DirEntry[str]]:
    """The entries of a folder; none where it is gone or shut."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return ()


def open_bytes(pid: int) -> int:
    """The bytes of all files that a process has open, but for a tracker's own."""
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
    """The CPU seconds of processes and of their children that have ended; of a `runner` those of its children alone.

    None where none of them can be seen.
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
