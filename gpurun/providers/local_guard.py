"""Runs as the first process of a local instance: creates its folder, and ends the instance at its deadline.

    python -m gpurun.providers.local_guard FOLDER TOKEN RUN DEADLINE_WALL

Starting this process creates the instance, so a local instance never exists without its timer. The process depends on
no other: even if the supervisor never returns, it kills every process with the instance's mark, and then itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from gpurun.core.clock import Clock, SystemClock
from gpurun.core.filelock import take_lock
from gpurun.core.paths import write_atomic
from gpurun.providers.processes import kill_instance

INSTANCE_FILE = "instance.json"
EXPIRED_FILE = "expired"
PERIOD_S = 0.5


def main(folder: Path, token: str, run: str, deadline_wall: float, clock: Clock) -> None:
    """Create the instance, then wait until it is destroyed or its deadline passes."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / "guard.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not take_lock(lock):
        return  # The same create was sent twice, so the first guard stays.
    (folder / "machine").mkdir(exist_ok=True, mode=0o700)
    facts = {
        "token": token,
        "run": run,
        "guard": os.getpid(),
        "created_wall": clock.wall(),
        "deadline_wall": deadline_wall,
    }
    write_atomic(folder / INSTANCE_FILE, json.dumps(facts).encode())
    _watch(folder, token, deadline_wall, clock)


def _watch(folder: Path, token: str, deadline_wall: float, clock: Clock) -> None:
    """End the instance when either clock reaches the deadline, so setting back the wall clock gains no time.

    An earlier deadline in the file `deadline` is adopted. The deadline in force is written to the file `spent`.
    """
    deadline_mono = clock.monotonic() + (deadline_wall - clock.wall())
    while (folder / INSTANCE_FILE).exists():
        with contextlib.suppress(OSError, ValueError):
            deadline_wall = min(deadline_wall, int((folder / "deadline").read_text()))
            deadline_mono = min(deadline_mono, clock.monotonic() + (deadline_wall - clock.wall()))
        with contextlib.suppress(OSError):
            (folder / "spent.new").write_text(f"0 0 {token} {int(deadline_wall)}\n")
            (folder / "spent.new").replace(folder / "spent")
        if clock.wall() >= deadline_wall or clock.monotonic() >= deadline_mono:
            with contextlib.suppress(OSError):  # The folder may be gone already; the processes must still be killed.
                (folder / EXPIRED_FILE).touch()
            break
        clock.sleep(PERIOD_S)
    # Also if the folder is missing: the process that removed it may have died before it killed the others.
    while kill_instance(token):
        clock.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), SystemClock())
