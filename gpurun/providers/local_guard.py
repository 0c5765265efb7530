"""The first process of a local instance: it makes the instance's folder and ends the instance at its deadline.

    python -m gpurun.providers.local_guard FOLDER TOKEN RUN DEADLINE_WALL

It is what power-on and the dead-man timer are on a cloud: starting this process *is* the create call, so an instance
either exists with its timer armed or does not exist. It needs no other process: if the laptop's supervisor never
returns, it kills everything that carries the instance's mark, and then itself.
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
    """Make the instance, then wait until it is destroyed or its deadline passes."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / "guard.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not take_lock(lock):
        return  # The same create, sent twice: the first guard stays.
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
    """End the instance at the deadline, by whichever clock reaches it first; a wall clock set back buys no time.

    An earlier time in `deadline` is adopted, and reported in `spent` as every guard reports it.
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
            with contextlib.suppress(OSError):  # The folder may be disappearing; the killing must continue.
                (folder / EXPIRED_FILE).touch()
            break
        clock.sleep(PERIOD_S)
    # A missing folder means the same: the process that removed it may have died before it killed any.
    while kill_instance(token):
        clock.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), SystemClock())
