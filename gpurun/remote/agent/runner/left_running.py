"""Processes that a command has left running when it ended: whether they were still working, and how they are ended."""

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
"""A share of a core. A process that used more, or that wrote anything, during the observation was working."""
MOST_NAMED = 20
SCRIPTS = (".py", ".sh", ".ipynb")
MONITORS = frozenset((
    "nvidia-smi", "tensorboard", "nvtop", "htop", "top", "gpustat", "tail", "watch", "sleep", "ssh-agent", "dmon",
    "iostat", "vmstat", "screen",
))  # fmt: skip
"""Programs that users leave running beside a training. Ending them loses nothing."""


def end_left_running(*, is_stopped: bool) -> Tuple[List[str], List[str]]:
    """Kill the processes that the command left behind, which became this process's children when the command ended.

    Return the names of all of them, and of those that were still working, such as a background training. After a stop,
    the second list is empty, because the work was ended on purpose.
    """
    working = still_working() if children() and not is_stopped else []
    names: List[str] = []
    for _ in range(50):  # The children's own children then become children of this process too.
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
    """Return the live children of this process, with their names."""
    return {pid: name for pid, (parent, name, _) in list_cpu_use().items() if parent == os.getpid()}


def still_working() -> List[str]:
    """Return the names of descendants that use a core or write, observed for a second after a short pause.

    Processes that end during the observation are not included.
    """
    time.sleep(SETTLE_S)
    before, began = use_of_descendants(), time.monotonic()
    time.sleep(SAMPLE_S)
    after, passed_s = use_of_descendants(), time.monotonic() - began
    names: List[str] = []
    for pid, (name, cpu_s, written) in after.items():
        if pid not in before or name in MONITORS:
            continue
        is_busy = cpu_s - before[pid][1] > LEAST_SHARE * passed_s
        if (is_busy or written > before[pid][2]) and (shown := process_name(pid, name)) not in names:
            names.append(shown)
    return names[:MOST_NAMED]


def use_of_descendants() -> Dict[int, Tuple[str, float, int]]:
    """Return, for every descendant, its name, the CPU seconds that it has used, and the bytes that it has written."""
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
    """Return every live process with its parent, its name and its CPU seconds; empty without /proc."""
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
    """Return the bytes that a process has written so far; 0 if that is not known."""
    try:
        with open("/proc/%d/io" % pid) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("wchar:"))
    except (OSError, ValueError):
        return 0


def process_name(pid: int, name: str) -> str:
    """Return the name of a process and of its script, but no other argument, because arguments may contain a secret."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        words = []
    scripts = [os.path.basename(word) for word in words[1:] if word.endswith(SCRIPTS)]
    return " ".join([name, *scripts[:1]])
