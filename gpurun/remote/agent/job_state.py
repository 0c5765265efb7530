"""What the keeper obeys and reports: the lease, the request to stop, the last sign of a client, the status.

A job that is found without a keeper is given one.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from gpurun.remote.agent.system import at, boot_id, lock, locked, monotonic, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.remote.agent.system import Json

# What a clock that is only kept right may gain or lose meanwhile; one that is set by less does no harm.
MOST_DRIFT_S = 5.0


def clocks_now() -> Json:
    """What both clocks say."""
    return {"boot_id": boot_id(), "wall": time.time(), "mono": monotonic()}


def clock_was_set(root: str) -> bool:
    """Whether the wall clock was set since `hello` told it; one that was never told in this boot may have been."""
    told, now = read(root, "agent", "clock.json") or {}, clocks_now()
    if told.get("boot_id") != now["boot_id"]:
        return True
    return bool(abs(now["wall"] - told["wall"] - (now["mono"] - told["mono"])) > MOST_DRIFT_S)


def bring_forward(root: str, soft_wall: float, hard_wall: float) -> Json:
    """Bring the lease forward, on the wall and on the monotonic clock; nothing puts it back."""
    held = locked(root, "lease.lock", 5)
    old, wall, mono = read(root, "agent", "lease.json") or {}, time.time(), monotonic()
    if old.get("boot_id") != boot_id():
        old = {key: value for key, value in old.items() if key.endswith("_wall")}
    hard = min(hard_wall, old.get("hard_stop_wall", hard_wall))
    soft = min(soft_wall, old.get("soft_stop_wall", soft_wall), hard)
    lease = {"boot_id": boot_id(), "soft_stop_wall": soft, "hard_stop_wall": hard}
    for which, value in (("soft_mono", mono + soft - wall), ("hard_mono", mono + hard - wall)):
        lease[which] = min(value, old.get(which, value))
    write(at(root, "agent", "lease.json"), lease)
    os.close(held)
    return lease


def request_stop(root: str, now: bool, reason: str) -> None:
    """Write down the request to stop; the first reason stays, and "now" is never taken back."""
    old = read(root, "agent", "stop.json") or {"now": False, "reason": reason}
    write(at(root, "agent", "stop.json"), {"now": old["now"] or now, "reason": old["reason"]})


def heard(root: str) -> None:
    """Note that a client asks: a touch alone, which needs no room on the disk once the file is there."""
    path = at(root, "agent", "heard")
    with suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            open(path, "ab").close()


def last_heard(root: str) -> int:
    """A mark of when a client asked last; whether the clock was set meanwhile does not matter to it."""
    try:
        return os.stat(at(root, "agent", "heard")).st_mtime_ns
    except OSError:
        return 0


def blank(root: str) -> Json:
    """A status before anything ran."""
    lease = read(root, "agent", "lease.json") or {}
    empty = dict.fromkeys(("pid", "started_wall", "exit_code", "signal", "stop_reason"))
    walls = {key: lease.get(key) for key in ("soft_stop_wall", "hard_stop_wall")}
    return dict(empty, v=1, state="idle", wall=time.time(), **walls)


def ensure_keeper(root: str, fresh: bool) -> str:
    """Give the job a keeper when none lives; "kept", "ended", "nobody", or what the new one does: "adopted", "started".

    Only with `fresh` may it start the trainer, and only when none of its processes lives. The keeper runs the same zip.
    """
    held = lock(root, "keeper.lock", 0.1 if fresh else 0.0)
    if held is None:
        return "kept"
    try:
        if read(root, "agent", "exit.json"):
            return "ended"
        from gpurun.remote.agent.login_environment import granted, remembered  # not sooner: most polls find a keeper
        from gpurun.remote.agent.processes import environment, trainers

        running = trainers(root)
        if not running and not fresh:
            return "nobody"
        import signal
        import subprocess

        if not running and os.path.exists(at(root, "agent", "keeper.json")):
            os.unlink(at(root, "agent", "keeper.json"))
        with open(at(root, "agent", "agent.log"), "ab") as log:
            command = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "keep", "--root", root]
            job = read(root, "agent", "job.json") or {}
            known = dict(remembered(root), **dict(granted(job.get("pass_env") or []), GPURUN_KEEPER_OF=root))
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Until the keeper can take a request.
            subprocess.Popen(
                command, env=environment(**known), pass_fds=(held,), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return "adopted" if running else "started"
    finally:
        os.close(held)  # the keeper holds its own copy until it dies
