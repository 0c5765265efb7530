"""How much memory a job had, how many processes the kernel killed for lack of memory, and the size of /dev/shm."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, Optional

    from gpurun.remote.agent.system import Json

CGROUPS, OWN = "/sys/fs/cgroup", "/proc/self/cgroup"
SHM = "/dev/shm"
MOST_BYTES = 1 << 60
"""A limit above this counts as no limit, because version 1 of cgroups writes a very large number for "unlimited"."""


def room(oom_before: Optional[int]) -> Json:
    """Return the facts at a job's end: its memory, the size of /dev/shm, and the kernel's kills since the job began."""
    kills = oom_kills()
    facts: Dict[str, Optional[int]] = {"memory_bytes": memory_bytes(), "shm_bytes": shm_bytes()}
    facts["oom_kills"] = None if kills is None or oom_before is None else max(0, kills - oom_before)
    return dict(facts)


def oom_kills() -> Optional[int]:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; None if unknown."""
    for folder in folders():
        for name in ("memory.events", "memory.oom_control"):
            counters = dict(
                line.split(None, 1) for line in read_kernel_file(folder, name).splitlines() if len(line.split()) == 2
            )
            if counters.get("oom_kill", "").strip().isdigit():
                return int(counters["oom_kill"])
    return None


def memory_bytes() -> int:
    """Return the smallest memory limit of this cgroup and its parents, but at most the machine's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_kernel_file(folder, name).strip()
            if limit.isdigit() and int(limit) < MOST_BYTES:
                limits.append(int(limit))
    return min(limits)


def shm_bytes() -> Optional[int]:
    """Return the size of /dev/shm, through which the workers of a DataLoader pass their batches; None if unknown."""
    try:
        facts = os.statvfs(SHM)
    except OSError:
        return None
    return facts.f_frsize * facts.f_blocks


def folders() -> Iterator[str]:
    """Yield the folders of this process's memory cgroup and its parents. In a container, the top is its own cgroup."""
    for line in read_kernel_file("", OWN).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers not in ("", "memory"):
            continue
        top = CGROUPS + "/memory" if controllers else CGROUPS
        path = path.rstrip("/")
        while True:
            yield top + path
            if not path:
                break
            path = path.rpartition("/")[0]


def read_kernel_file(folder: str, name: str) -> str:
    """Return the content of a kernel file; "" if it does not exist."""
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read(1 << 16)
    except (OSError, ValueError):
        return ""
