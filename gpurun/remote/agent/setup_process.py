"""The user's own script: started once, however often it is asked for, and ended at its limit by who needs no line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from gpurun.remote.agent.processes import find_marked, send_signal
from gpurun.remote.agent.system import at, boot_id, lock, monotonic, read, read_part, say, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Set

    from gpurun.remote.agent.system import Answer, Json

SCRIPT, LOG, RECORD, LOCK = "setup.sh", "setup.log", "setup.json", "setup.lock"
TAIL_BYTES = 4000
TICK_S = 0.1
# One that is still there so long after a KILL hangs in the kernel, or is another user's.
KILLED_S = 10.0
CANNOT_RUN = 126  # As a shell says it of a program that is there and cannot be started.


def setup(root: str, options: Json) -> Answer:
    """How the script is, its last words, and its log from an offset on; with `--limit` it is begun unless it ever was.

    Begun and without an end, with nobody who watches it, it is "lost", or "rebooted": it is never begun again.
    """
    if "limit" in options:
        begin_setup(root, float(options["limit"]))
    told, path = state_of(root), at(root, LOG)  # Its state first: once that is an end, all of its log is there.
    data, size = read_part(path, int(options["from"]), int(options["most"]))
    tail = read_part(path, max(0, size - TAIL_BYTES), TAIL_BYTES)[0].decode("utf-8", "replace")
    return dict(told, size=size, bytes=len(data), tail=tail), data


def begin_setup(root: str, limit_s: float) -> None:
    """Give the script a process that runs it, once: on disk before that, so no crash makes it begin twice."""
    held = lock(root, LOCK, 0.0)
    if held is None:
        return
    try:
        path = at(root, "agent", RECORD)
        if os.path.lexists(path):
            return
        write(path, {"boot_id": boot_id(), "begun_mono": monotonic(), "limit_s": limit_s})
        command = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "attend", "--root", root]
        try:
            with open(at(root, "agent", "agent.log"), "ab") as log:
                # It has the surroundings of a login, as when it is run by hand: it is the user's own.
                subprocess.Popen(
                    command, env=dict(os.environ, GPURUN_SETUP_OF=root), pass_fds=(held,), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
        except OSError:
            os.unlink(path)  # Certainly nothing has run.
            raise
    finally:
        os.close(held)  # Who attends to it holds a copy until it ends.


def state_of(root: str) -> Json:
    """What is on record, and whether somebody attends to it."""
    if not os.path.lexists(at(root, "agent", RECORD)):
        return {"state": "none", "ran_s": 0.0, "exit_code": None, "signal": None}
    held = lock(root, LOCK, 0.0)
    if held is not None:
        os.close(held)
    record = read(root, "agent", RECORD) or {}  # After the lock was free nobody writes to it any more.
    if "end" in record:
        return dict(record["end"])
    is_same_boot = record.get("boot_id") == boot_id()
    ran_s = max(0.0, monotonic() - record["begun_mono"]) if is_same_boot else 0.0
    state = "running" if held is None else "lost" if is_same_boot else "rebooted"
    return {"state": state, "ran_s": ran_s, "exit_code": None, "signal": None}


def attend(root: str, _: Json) -> Answer:
    """Run the script and wait for the end of its first process, or end all of it at its limit; write down which.

    What it leaves running in the background holds nobody up, and lives on.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    record = read(root, "agent", RECORD)
    end_mono, is_late = record["begun_mono"] + record["limit_s"], False
    child = launch_script(root)
    code = CANNOT_RUN if child is None else child.poll()
    while child is not None and code is None:
        is_late = monotonic() >= end_mono
        if is_late:
            with suppress(OSError):  # By group too, for where there is no /proc; it may have ended just now.
                os.killpg(child.pid, signal.SIGKILL)
            end_setups(root)
            break
        time.sleep(TICK_S)
        code = child.poll()
    by_signal = code is not None and code < 0
    end: Json = {"exit_code": None if by_signal else code, "signal": -code if code is not None and by_signal else None}
    end.update(state="killed" if is_late else "ended", ran_s=max(0.0, monotonic() - record["begun_mono"]))
    for _once in range(60):  # On a full disk, try for a minute.
        try:
            write(at(root, "agent", RECORD), dict(record, end=end))
            break
        except OSError as error:
            say("the end of the set-up is not written down: %s" % error)
            time.sleep(1)
    return {}, b""


def launch_script(root: str) -> Any:
    """The script's first process, in a session of its own, by its own `#!` or else by sh; None where there is none."""
    path = at(root, SCRIPT)
    with open(at(root, LOG), "ab") as log:
        try:
            os.chmod(path, 0o700)
            with open(path, "rb") as script:
                command = [path] if script.read(2) == b"#!" else ["sh", path]
            return subprocess.Popen(
                command, env=os.environ, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            log.write(("%s cannot be started: %s\n" % (SCRIPT, error)).encode("utf-8", "replace"))
            return None


def setups(root: str) -> Set[int]:
    """The live processes of the script, with what it left running, and who attends to it."""
    return find_marked(root, b"GPURUN_SETUP_OF=", RECORD, "pid")


def end_setups(root: str) -> None:
    """Kill the script with all that it started, whatever session that is in."""
    until_mono = monotonic() + KILLED_S
    while (left := setups(root) - {os.getpid()}) and monotonic() < until_mono:
        send_signal(left, signal.SIGKILL)
        time.sleep(0.05)
