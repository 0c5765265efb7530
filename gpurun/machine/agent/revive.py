"""Whoever finds a job without a keeper gives it one."""

from __future__ import annotations

import os
import sys

from gpurun.machine.agent.files import at, lock, read


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
        from gpurun.machine.agent.processes import environment, trainers  # not sooner: most polls find a keeper

        running = trainers(root)
        if not running and not fresh:
            return "nobody"
        import signal
        import subprocess

        if not running and os.path.exists(at(root, "agent", "keeper.json")):
            os.unlink(at(root, "agent", "keeper.json"))
        with open(at(root, "agent", "agent.log"), "ab") as log:
            command = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "keep", "--root", root]
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Until the keeper can take a wish.
            subprocess.Popen(
                command, env=environment(GPURUN_KEEPER_OF=root), pass_fds=(held,), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return "adopted" if running else "started"
    finally:
        os.close(held)  # the keeper holds its own copy until it dies
