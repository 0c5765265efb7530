"""Removes a run from a machine that is kept: all its processes, and all its files except requested ones."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress

from gpurun.remote.agent.job_control import stop
from gpurun.remote.agent.job_secrets import drop_secrets
from gpurun.remote.agent.processes import keepers, kill_all, send_signal, trainers
from gpurun.remote.agent.setup_process import end_setups, setups
from gpurun.remote.agent.system import Refusal, lock, path_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Set

    from gpurun.remote.agent.system import Answer, Json

WAIT_S = 20


def farewell(root: str, options: Json) -> Answer:
    """End the trainer, the keeper and the set-up's processes at once; then remove the run's whole folder.

    With `--keep out` the trainer's outputs stay, and with `bundle` a command's own folder: no other copy exists.
    """
    check_own(root)
    killed = len(trainers(root) | setups(root))
    end_setups(root)
    drop_secrets(root)
    stop(root, {"now": True, "reason": "farewell"})
    # On a full disk, the files are removed first, which makes space for what must be written.
    kept = tuple(name for name in str(options.get("keep") or "").split(",") if name in ("out", "bundle"))
    remove_names(root, {"bundle", "data", "out"}.difference(kept))
    # The keeper ends last, and by itself: only it knows the children that the trainer's processes left behind.
    if lock(root, "keeper.lock", WAIT_S) is None:
        send_signal(keepers(root), signal.SIGKILL)
        if lock(root, "keeper.lock", 1) is None:
            raise Refusal("busy", "the keeper cannot be ended")
    kill_all(root)
    if kept:
        remove_names(root, set(os.listdir(root)).difference(kept))
    else:
        shutil.rmtree(root, ignore_errors=True)
    left = set(os.listdir(root)) if os.path.exists(root) else set()
    if trainers(root) or setups(root) or left.difference(kept) or (os.path.exists(root) and not kept):
        raise Refusal("not_gone", "some processes or files of the run are left in %s" % root)
    return {"killed": killed}, b""


def remove_names(root: str, names: Set[str]) -> None:
    """Remove files and folders of the run's folder, as far as possible."""
    for name in names:
        path = path_in(root, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)


def check_own(root: str) -> None:
    """Refuse to remove a folder that is not clearly a run's own."""
    home = os.path.realpath(os.path.expanduser("~"))
    if (home + os.sep).startswith(root.rstrip(os.sep) + os.sep) or os.path.realpath(sys.argv[0]) != path_in(
        root, "agent.pyz"
    ):
        raise Refusal("not_a_run", "%s is not the folder of a run" % root)
