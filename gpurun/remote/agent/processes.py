"""The trainer's processes: found by mark and ancestry, signalled, killed, and given a minimal environment."""

from __future__ import annotations

import os
import re
import signal
import time

from gpurun.remote.agent.system import read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Set, Tuple

OF_THE_CALL = r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TMPDIR|TZ|GPURUN_INSTANCE"
PASSED_ON = OF_THE_CALL + r"|\w*LD_LIBRARY_PATH|CUDA_\w+|NVIDIA_\w+"
FAMILIES = (
    r"(NCCL|GLOO|UCX|FI|TORCH|HF_HUB|PIP|UV|SSL_CERT|XDG|MKL|OMP)_\w+|HF_HOME|HF_ENDPOINT|REQUESTS_CA_BUNDLE"
    r"|CURL_CA_BUNDLE|\w+_proxy|\w+_PROXY"
)
"""Variables that a machine's owner sets and that the job should inherit: for network, caches and proxies."""
OF_A_SET_UP = r"PYTHONPATH|VIRTUAL_ENV|CONDA_\w+"
"""Variables that `module load` and `conda activate` set for a Python. They are passed on in a cluster's job."""
SECRET_NAME = r"(?i).*(TOKEN|SECRET|PASS|CREDENTIAL|APIKEY|(^|_)(KEY|AUTH|USERNAME)($|_)).*"
WITH_USER = r"(^|//|[\s,;])[^/\s,;]+@"
"""In a value: the user of a URL, with or without a password."""


def list_processes() -> Dict[int, Tuple[int, Set[bytes]]]:
    """Return every visible live process with its parent and its environment; empty without /proc."""
    seen = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open("/proc/%s/stat" % name, "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # It is not a process, or it has ended.
        try:
            with open("/proc/%s/environ" % name, "rb") as file:
                pairs = set(file.read().split(b"\0"))
        except OSError:
            pairs = set()  # It is another user's process.
        if name.isdigit() and state not in b"ZX":
            seen[int(name)] = (int(parent), pairs)
    return seen


def trainers(root: str) -> Set[int]:
    """Return the trainer's live processes: those with its mark, and all descendants of those or of the keeper."""
    seen = list_processes()
    if not seen:
        pid = (read(root, "agent", "keeper.json") or {}).get("pid")
        return {pid} if pid and alive(pid) else set()
    mark = b"GPURUN_TRAINER_OF=" + os.fsencode(root)
    found, size = {pid for pid, (_, pairs) in seen.items() if mark in pairs}, -1
    while size != len(found):
        size = len(found)
        found |= {pid for pid, (parent, _) in seen.items() if parent in found or parent == os.getpid()}
    return found - {os.getpid()}


def keepers(root: str) -> Set[int]:
    """Return the keeper's live processes, at most one."""
    return find_marked(root, b"GPURUN_KEEPER_OF=", "keeper.json", "keeper_pid")


def find_marked(root: str, mark: bytes, name: str, key: str) -> Set[int]:
    """Return the live processes with a mark of this run; without /proc, the process that a file names."""
    seen, pair = list_processes(), mark + os.fsencode(root)
    if not seen:
        pid = (read(root, "agent", name) or {}).get(key)
        return {pid} if pid and alive(pid) else set()
    return {pid for pid, (_, pairs) in seen.items() if pair in pairs}


def alive(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def send_signal(pids: Set[int], number: int) -> None:
    """Signal processes. Some of them may have ended, which is ignored."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def kill_all(root: str) -> None:
    """Kill every process of the trainer, in any session, including those that are started meanwhile."""
    for _ in range(50):
        left = trainers(root)
        if not left:
            return
        send_signal(left if os.path.isdir("/proc/self") else {-pid for pid in left}, signal.SIGKILL)
        time.sleep(0.05)


def environment(**extra: str) -> Dict[str, str]:
    """Return the environment for a child process: the variables of this process that may be passed on, plus `extra`."""
    return dict({name: value for name, value in os.environ.items() if may_pass_variable(name, value)}, **extra)


def may_pass_variable(name: str, value: str) -> bool:
    """Return whether a variable is passed on by default: it has a known name, and it does not look like a key."""
    is_set_up = bool(os.environ.get("SLURM_JOB_ID")) and bool(re.fullmatch(OF_A_SET_UP, name))
    is_known = is_set_up or bool(re.fullmatch(FAMILIES, name))
    return bool(re.fullmatch(PASSED_ON, name)) or (is_known and not looks_secret(name, value))


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a key: by its name, or because its value has a URL with a user."""
    return bool(re.fullmatch(SECRET_NAME, name) or re.search(WITH_USER, value))
