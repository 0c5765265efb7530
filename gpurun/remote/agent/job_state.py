"""The keeper's inputs and outputs: the lease, the request to stop, the last contact of a client, the status.

If a job has no keeper, a new keeper is started.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from gpurun.remote.agent.system import boot_id, lock, locked, monotonic, path_in, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.remote.agent.system import Json

# How far a well-kept clock may drift in this time. Setting the clock by less does no harm.
MOST_DRIFT_S = 5.0


def clocks_now() -> Json:
    """Return the time by the wall clock and by the monotonic clock, with the boot id."""
    return {"boot_id": boot_id(), "wall": time.time(), "mono": monotonic()}


def clock_was_set(root: str) -> bool:
    """Return whether the wall clock was set since `hello` reported it, or may have been (no report in this boot)."""
    noted, now = read(root, "agent", "clock.json") or {}, clocks_now()
    if noted.get("boot_id") != now["boot_id"]:
        return True
    return bool(abs(now["wall"] - noted["wall"] - (now["mono"] - noted["mono"])) > MOST_DRIFT_S)


def bring_forward(root: str, soft_wall: float, hard_wall: float) -> Json:
    """Shorten the lease, on the wall clock and on the monotonic clock. It is never extended."""
    held = locked(root, "lease.lock", 5)
    old, wall, mono = read(root, "agent", "lease.json") or {}, time.time(), monotonic()
    if old.get("boot_id") != boot_id():
        old = {key: value for key, value in old.items() if key.endswith("_wall")}
    hard = min(hard_wall, old.get("hard_stop_wall", hard_wall))
    soft = min(soft_wall, old.get("soft_stop_wall", soft_wall), hard)
    lease = {"boot_id": boot_id(), "soft_stop_wall": soft, "hard_stop_wall": hard}
    for which, value in (("soft_mono", mono + soft - wall), ("hard_mono", mono + hard - wall)):
        lease[which] = min(value, old.get(which, value))
    write(path_in(root, "agent", "lease.json"), lease)
    os.close(held)
    return lease


def request_stop(root: str, now: bool, reason: str) -> None:
    """Record the request to stop. The first reason is kept, and "now" is never withdrawn."""
    old = read(root, "agent", "stop.json") or {"now": False, "reason": reason}
    write(path_in(root, "agent", "stop.json"), {"now": old["now"] or now, "reason": old["reason"]})


def note_call(root: str) -> None:
    """Record that a client called, only by touching a file, which needs no disk space once the file exists."""
    path = path_in(root, "agent", "heard")
    with suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            open(path, "ab").close()


def last_heard(root: str) -> int:
    """Return a number that changes whenever a client calls; 0 before the first call."""
    try:
        return os.stat(path_in(root, "agent", "heard")).st_mtime_ns
    except OSError:
        return 0


def blank(root: str) -> Json:
    """Return the status of a machine on which no job was started."""
    lease = read(root, "agent", "lease.json") or {}
    empty = dict.fromkeys(("pid", "started_wall", "exit_code", "signal", "stop_reason"))
    walls = {key: lease.get(key) for key in ("soft_stop_wall", "hard_stop_wall")}
    return dict(empty, v=1, state="idle", wall=time.time(), **walls)


def ensure_keeper(root: str, fresh: bool) -> str:
    """Start a keeper for the job, from the same zip, if there is none. Return what was found or done.

    - "kept": a keeper lives.
    - "ended": the job's end is recorded.
    - "nobody": the trainer has no process, and none is started, because `fresh` is False.
    - "adopted": the new keeper watches the running trainer.
    - "started": the new keeper starts the trainer.
    """
    held = lock(root, "keeper.lock", 0.1 if fresh else 0.0)
    if held is None:
        return "kept"
    try:
        if read(root, "agent", "exit.json"):
            return "ended"
        from gpurun.remote.agent.login_environment import (  # Most polls find a keeper and do not need this import.
            granted_variables,
            remembered_variables,
        )
        from gpurun.remote.agent.processes import environment, trainers

        running = trainers(root)
        if not running and not fresh:
            return "nobody"
        import signal
        import subprocess

        if not running and os.path.exists(path_in(root, "agent", "keeper.json")):
            os.unlink(path_in(root, "agent", "keeper.json"))
        with open(path_in(root, "agent", "agent.log"), "ab") as log:
            command = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "keep", "--root", root]
            job = read(root, "agent", "job.json") or {}
            known = dict(
                remembered_variables(root), **dict(granted_variables(job.get("pass_env") or []), GPURUN_KEEPER_OF=root)
            )
            # The signal is blocked until the keeper can handle it.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            subprocess.Popen(
                command, env=environment(**known), pass_fds=(held,), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return "adopted" if running else "started"
    finally:
        os.close(held)  # The keeper has its own copy until it dies.
