"""What may be asked of a job that was started: to stop, or to stop earlier."""

from __future__ import annotations

import signal

from gpurun.machine.agent.files import read
from gpurun.machine.agent.processes import keepers, kill_all, send
from gpurun.machine.agent.protocol import Refusal
from gpurun.machine.agent.revive import ensure_keeper
from gpurun.machine.agent.state import bring_forward, wish_stop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.machine.agent.protocol import Answer, Json


def stop(root: str, options: Json) -> Answer:
    """Ask the keeper to end the trainer; where the disk takes no wish, by a signal, and an end at once is made here."""
    told, is_written = (root, "now" in options, options["reason"][:200]), True
    try:
        wish_stop(*told)
    except OSError:
        is_written = False
    asked = bool(read(root, "agent", "job.json")) and ensure_keeper(root, fresh=False) in ("kept", "adopted")
    if not is_written:
        send(keepers(root), signal.SIGTERM)
        if told[1]:
            kill_all(root)
    return {"asked": asked}, b""


def shorten(root: str, options: Json) -> Answer:
    """Bring the lease forward; never back."""
    soft, hard = float(options["soft"]), float(options["hard"])
    if not (0 <= soft < 1e12 and 0 <= hard < 1e12):
        raise Refusal("usage", "a lease is two times in seconds since the epoch")
    lease = bring_forward(root, soft, hard)
    if read(root, "agent", "job.json"):
        ensure_keeper(root, fresh=False)
    return {key: lease[key] for key in ("soft_stop_wall", "hard_stop_wall")}, b""
