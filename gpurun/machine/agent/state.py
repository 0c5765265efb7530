"""What the keeper obeys and reports: the lease, the wish to stop, and the status that both appear in."""

from __future__ import annotations

import os
import time

from gpurun.machine.agent.clocks import boot_id, monotonic
from gpurun.machine.agent.files import at, locked, read, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.machine.agent.protocol import Json

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


def wish_stop(root: str, now: bool, reason: str) -> None:
    """Write down the wish to stop; the first reason stays, and "now" is never taken back."""
    old = read(root, "agent", "stop.json") or {"now": False, "reason": reason}
    write(at(root, "agent", "stop.json"), {"now": old["now"] or now, "reason": old["reason"]})


def blank(root: str) -> Json:
    """A status before anything ran."""
    lease = read(root, "agent", "lease.json") or {}
    empty = dict.fromkeys(("pid", "started_wall", "exit_code", "signal", "stop_reason"))
    walls = {key: lease.get(key) for key in ("soft_stop_wall", "hard_stop_wall")}
    return dict(empty, v=1, state="idle", wall=time.time(), **walls)
