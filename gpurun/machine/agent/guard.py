"""The guard: a script that ends this machine at its deadline, kept running beside the key that it reads.

Some clouds have no other way to end a machine that nobody watches any more. Script and key are put into `guard/` first;
whoever takes the key away disarms it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

from gpurun.machine.agent.clocks import monotonic
from gpurun.machine.agent.files import at, locked, part, write
from gpurun.machine.agent.processes import environment, marked, send
from gpurun.machine.agent.protocol import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Set

    from gpurun.machine.agent.protocol import Answer, Json

SCRIPT, KEY, LOG, FIRST_LOOK = "guard.sh", "guard.key", "guard.log", "spent"
WAIT_S = 5


def arm(root: str, _: Json) -> Answer:
    """Start the guard in a session of its own, once, and see that it lives."""
    held, living = locked(root, "guard.lock", WAIT_S), guards(root)
    pid = min(living) if living else started(root)
    os.close(held)
    return {"pid": pid, "already": bool(living)}, b""


def disarm(root: str, _: Json) -> Answer:
    """Take the guard's key away first, then the guard and its folder; harmless where there is none."""
    held, folder = locked(root, "guard.lock", WAIT_S), at(root, "guard")
    there = os.path.exists(folder)
    for name in (KEY, SCRIPT):
        if os.path.exists(at(folder, name)):
            os.unlink(at(folder, name))
    end = monotonic() + WAIT_S
    while guards(root) and monotonic() < end:
        send(guards(root), signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
    return {"disarmed": there}, b""


def guards(root: str) -> Set[int]:
    """The guard's live processes: all that carry its mark."""
    return marked(root, b"GPURUN_GUARD_OF=", "guard.json", "pid")


def started(root: str) -> int:
    """Start the script and wait until it has looked at its clocks; the process."""
    folder = at(root, "guard")
    for name in (SCRIPT, KEY):
        if not os.path.isfile(at(folder, name)):
            raise Refusal("no_guard", "%s was not put here" % name)
    before = looked_at(folder)
    with open(at(folder, LOG), "ab") as log:
        child = subprocess.Popen(
            ["/bin/sh", at(folder, SCRIPT)], cwd=folder, env=environment(GPURUN_GUARD_OF=root), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    end = monotonic() + WAIT_S
    while child.poll() is None and looked_at(folder) == before and monotonic() < end:
        time.sleep(0.02)
    if child.poll() is not None:
        words = part(at(folder, LOG), 0, 300)[0].decode("utf-8", "replace").strip()
        raise Refusal("guard_failed", "the guard ended with %s: %s" % (child.poll(), words or "it said nothing"))
    write(at(root, "agent", "guard.json"), {"pid": child.pid})
    return child.pid


def looked_at(folder: str) -> int:
    """When the guard last wrote down what time it has left; 0 when it never did."""
    try:
        return os.stat(at(folder, FIRST_LOOK)).st_mtime_ns
    except OSError:
        return 0
