"""What a command has left running when it ended: whether that was still at work, and its end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Tuple

SETTLE_S, SAMPLE_S, TICK_S = 0.5, 1.0, 0.05
LEAST_SHARE = 0.05
"""Of one core: a process that used more, or wrote anything, while it was looked at, was at work."""
MOST_NAMED = 20
SCRIPTS = (".py", ".sh", ".ipynb")
MONITORS = frozenset((
    "nvidia-smi", "tensorboard", "nvtop", "htop", "top", "gpustat", "tail", "watch", "sleep", "ssh-agent", "dmon",
    "iostat", "vmstat", "screen",
))  # fmt: skip
"""What people leave running beside a training; its end loses nothing."""


def end_left_running(*, is_stopped: bool) -> Tuple[List[str], List[str]]:
    """Kill what the command has left behind, which is this process's children since it ended.

    The names of all, and of those that were still at work: a training in the background, say, and no idle leftover.
    Of a command that was stopped this is not asked: its work was ended on purpose.
    """
    working = still_working() if children() and not is_stopped else []
    names: List[str] = []
    for _ in range(50):  # What the children leave is adopted in turn.
        left = children()
        if not left:
            break
        names += [name for name in left.values() if name not in names]
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(TICK_S)
    return names, working


def children() -> Dict[int, str]:
    """The live children of this process, by their names."""
    return {pid: name for pid, (parent, name, _) in list_cpu_use().items() if parent == os.getpid()}


def still_working() -> List[str]:
    """The names of processes below this one that use a core or write, looked at for a second after a short rest.

    Those that end by themselves meanwhile are none of them.
    """
    time.sleep(SETTLE_S)
    before, began = used(), time.monotonic()
    time.sleep(SAMPLE_S)
    after, passed_s = used(), time.monotonic() - began
    names: List[str] = []
    for pid, (name, cpu_s, written) in after.items():
        if pid not in before or name in MONITORS:
            continue
        is_busy = cpu_s - before[pid][1] > LEAST_SHARE * passed_s
        if (is_busy or written > before[pid][2]) and (told := named(pid, name)) not in names:
            names.append(told)
    return names[:MOST_NAMED]


def used() -> Dict[int, Tuple[str, float, int]]:
    """Of every process below this one: its name, the seconds of CPU that it has used, and the bytes it has written."""
    seen = list_cpu_use()
    below, found = {os.getpid()}, {}
    for _ in range(len(seen)):
        more = {pid for pid, (parent, _, _) in seen.items() if parent in below} - below
        if not more:
            break
        below |= more
    for pid in below - {os.getpid()}:
        _, name, cpu_s = seen[pid]
        found[pid] = (name, cpu_s, written_by(pid))
    return found


def list_cpu_use() -> Dict[int, Tuple[int, str, float]]:
    """Every live process: its parent, its name, and the seconds of CPU that it has used. Nothing without /proc."""
    found = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % entry, errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if fields[0] not in "ZX":
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found[int(entry)] = (int(fields[1]), name, cpu_s)
    return found


def written_by(pid: int) -> int:
    """The bytes that a process has written so far; 0 where that is not told."""
    try:
        with open("/proc/%d/io" % pid) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("wchar:"))
    except (OSError, ValueError):
        return 0


def named(pid: int, name: str) -> str:
    """The name of a process with that of its script, and no other word: those may hold a secret."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        words = []
    scripts = [os.path.basename(word) for word in words[1:] if word.endswith(SCRIPTS)]
    return " ".join([name, *scripts[:1]])
