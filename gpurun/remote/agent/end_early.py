"""Ends the machine earlier: writes an earlier time for the guard, which ends the machine at its deadline.

The guard reads its folder every few seconds, and writes the earliest time that it has seen into the file `spent`. That
file is read back to confirm that the time was accepted.
"""

from __future__ import annotations

import os
import subprocess
import time

from gpurun.remote.agent.processes import environment
from gpurun.remote.agent.system import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Tuple

    from gpurun.remote.agent.system import Answer, Json

WRITE = 'umask 022; echo "$1" >"$2/deadline.new" && mv -f "$2/deadline.new" "$2/deadline"'
SUDO_S, TAKEN_S, LOOK_S = 10.0, 12.0, 0.1


def end(_: str, options: Json) -> Answer:
    """Move the guard's deadline forward to `at` (0 means now), and confirm it. A deadline is never moved back."""
    return ended(options["folder"], float(options.get("at", 0))), b""


def ended(folder: str, at_wall: float) -> Json:
    """Return the reply to `end`. Its `deadline` is read back from the guard; it is null if the guard has none.

    If the deadline is already early enough, it is sufficient that the guard is alive, which means that it wrote within
    its last few checks.
    """
    wall = int(at_wall) or int(time.time())
    stamp, deadline, age_s = read_guard(folder)
    if not stamp:
        return {"taken": False, "deadline": None, "message": "no timer has written to %s" % folder}
    if deadline is not None and deadline <= min(wall, time.time()):
        # The deadline has passed, so the guard no longer reads the file.
        return {"taken": True, "deadline": deadline, "message": ""}
    if deadline is not None and deadline <= wall and 0.0 <= age_s <= TAKEN_S:
        return {"taken": True, "deadline": deadline, "message": ""}
    trouble = "" if deadline is not None and deadline <= wall else write_guard_time(folder, wall)
    limit, now = monotonic() + (1.0 if trouble else TAKEN_S), stamp
    while monotonic() < limit and (now == stamp or deadline is None or deadline > wall):
        time.sleep(LOOK_S)
        now, deadline, _ = read_guard(folder)
    taken = now != stamp and deadline is not None and deadline <= wall
    silent = "the timer in %s does not check its time" % folder
    message = "" if taken else trouble or (silent if now == stamp else "the timer did not accept the time")
    return {"taken": taken, "deadline": deadline, "message": message}


def read_guard(folder: str) -> Tuple[int, Optional[int], float]:
    """Return a number that changes when the guard writes (0: never), its deadline, and the seconds since it wrote."""
    try:
        with open(os.path.join(folder, "spent"), "rb") as file:
            words = file.read(200).split()
            stamp = os.fstat(file.fileno())
    except OSError:
        return 0, None, 0.0
    deadline = int(words[3]) if len(words) > 3 and words[3].isdigit() else None
    return stamp.st_mtime_ns ^ stamp.st_ino, deadline, time.time() - stamp.st_mtime


def write_guard_time(folder: str, wall: int) -> str:
    """Write the time for the guard, with sudo if this user may not. Return the reason of a failure, or ""."""
    words, tried = ["sh", "-c", WRITE, "sh", str(wall), folder], ""
    for way in ([], ["sudo", "-n"]):
        try:
            done = subprocess.run(
                way + words, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, timeout=SUDO_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            tried += "%s; " % error
            continue
        if done.returncode == 0:
            return ""
        tried += done.stderr.decode("utf-8", "replace").strip() + "; "
    return "the time cannot be written there: %s" % tried.rstrip("; ")[:300]
