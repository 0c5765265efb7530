"""Leaving a machine that is kept: nothing of the run stays there, neither a process nor a file."""

from __future__ import annotations

import os
import shutil
import signal
import sys

from gpurun.machine.agent.files import at, lock
from gpurun.machine.agent.guard import disarm, guards
from gpurun.machine.agent.orders import stop
from gpurun.machine.agent.processes import keepers, kill_all, send, trainers
from gpurun.machine.agent.protocol import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpurun.machine.agent.protocol import Answer, Json

WAIT_S = 20


def farewell(root: str, _: Json) -> Answer:
    """End the trainer at once, and the keeper and the guard with it; then remove the run's whole folder."""
    check_own(root)
    killed = len(trainers(root) | guards(root))
    stop(root, {"now": True, "reason": "farewell"})
    # Where the disk is full there is room again by this, before anything more is written.
    for name in ("bundle", "data", "out"):
        shutil.rmtree(at(root, name), ignore_errors=True)
    disarm(root, {})
    # The keeper ends last, and by itself: it alone knows the children that the trainer's processes left behind.
    if lock(root, "keeper.lock", WAIT_S) is None:
        send(keepers(root), signal.SIGKILL)
        if lock(root, "keeper.lock", 1) is None:
            raise Refusal("busy", "the keeper cannot be ended")
    kill_all(root)
    shutil.rmtree(root, ignore_errors=True)
    if trainers(root) or guards(root) or os.path.exists(root):
        raise Refusal("not_gone", "some of the run's processes or files are left in %s" % root)
    return {"killed": killed}, b""


def check_own(root: str) -> None:
    """Refuse to remove a folder that is not plainly a run's own."""
    home = os.path.realpath(os.path.expanduser("~"))
    if (home + os.sep).startswith(root.rstrip(os.sep) + os.sep) or os.path.realpath(sys.argv[0]) != at(
        root, "agent.pyz"
    ):
        raise Refusal("not_a_run", "%s is not the folder of a run" % root)
