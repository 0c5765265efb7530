"""The user's set-up script: started once, however often it is requested, and ended at its limit without a client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from gpurun.remote.agent.processes import find_marked, send_signal
from gpurun.remote.agent.system import boot_id, lock, monotonic, path_in, read, read_part, say, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Set

    from gpurun.remote.agent.system import Answer, Json

SCRIPT, LOG, RECORD, LOCK = "setup.sh", "setup.log", "setup.json", "setup.lock"
TAIL_BYTES = 4000
TICK_S = 0.1
# A process that survives a KILL for this long hangs in the kernel, or belongs to another user.
KILLED_S = 10.0
CANNOT_RUN = 126  # A shell's exit code for a program that exists but cannot be started.


def setup(root: str, options: Json) -> Answer:
    """Return the script's state, its last output, and its log from an offset on. With `--limit`, start it first.

    A script that was started but has no recorded end and no watching process is "lost" or, after a reboot, "rebooted".
    It is never started again.
    """
    if "limit" in options:
        begin_setup(root, float(options["limit"]))
    # The state is read first: if it shows the script's end, the log is complete.
    state, path = state_of(root), path_in(root, LOG)
    data, size = read_part(path, int(options["from"]), int(options["most"]))
    tail = read_part(path, max(0, size - TAIL_BYTES), TAIL_BYTES)[0].decode("utf-8", "replace")
    return dict(state, size=size, bytes=len(data), tail=tail), data


def begin_setup(root: str, limit_s: float) -> None:
    """Start a process that runs the script, once. This is recorded on disk first, so that no crash starts it twice."""
    held = lock(root, LOCK, 0.0)
    if held is None:
        return
    try:
        path = path_in(root, "agent", RECORD)
        if os.path.lexists(path):
            return
        write(path, {"boot_id": boot_id(), "begun_mono": monotonic(), "limit_s": limit_s})
        command = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "attend", "--root", root]
        try:
            with open(path_in(root, "agent", "agent.log"), "ab") as log:
                # The script is the user's own, so it gets a login's environment, as if the user had run it.
                subprocess.Popen(
                    command, env=dict(os.environ, GPURUN_SETUP_OF=root), pass_fds=(held,), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
        except OSError:
            os.unlink(path)  # The script certainly did not run.
            raise
    finally:
        os.close(held)  # The script's watching process has a copy until it ends.


def state_of(root: str) -> Json:
    """Return the script's record with its state, which depends on whether a process watches the script."""
    if not os.path.lexists(path_in(root, "agent", RECORD)):
        return {"state": "none", "ran_s": 0.0, "exit_code": None, "signal": None}
    held = lock(root, LOCK, 0.0)
    if held is not None:
        os.close(held)
    record = read(root, "agent", RECORD) or {}  # Once the lock is free, no process writes to the record.
    if "end" in record:
        return dict(record["end"])
    is_same_boot = record.get("boot_id") == boot_id()
    ran_s = max(0.0, monotonic() - record["begun_mono"]) if is_same_boot else 0.0
    state = "running" if held is None else "lost" if is_same_boot else "rebooted"
    return {"state": state, "ran_s": ran_s, "exit_code": None, "signal": None}


def attend(root: str, _: Json) -> Answer:
    """Run the script and wait for the end of its first process, or kill all of it at its limit. Record which happened.

    Background processes of the script are not waited for, and continue to run.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    record = read(root, "agent", RECORD)
    end_mono, is_late = record["begun_mono"] + record["limit_s"], False
    child = launch_script(root)
    code = CANNOT_RUN if child is None else child.poll()
    while child is not None and code is None:
        is_late = monotonic() >= end_mono
        if is_late:
            with suppress(OSError):  # The group is killed too, in case there is no /proc. It may just have ended.
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
            write(path_in(root, "agent", RECORD), dict(record, end=end))
            break
        except OSError as error:
            say("the end of the set-up could not be recorded: %s" % error)
            time.sleep(1)
    return {}, b""


def launch_script(root: str) -> Any:
    """Start the script in its own session, by its `#!` line or else by sh. Return None if that fails."""
    path = path_in(root, SCRIPT)
    with open(path_in(root, LOG), "ab") as log:
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
    """Return the live processes of the set-up script: its own, those that it left running, and its watching process."""
    return find_marked(root, b"GPURUN_SETUP_OF=", RECORD, "pid")


def end_setups(root: str) -> None:
    """Kill the script with everything that it started, in any session."""
    until_mono = monotonic() + KILLED_S
    while (left := setups(root) - {os.getpid()}) and monotonic() < until_mono:
        send_signal(left, signal.SIGKILL)
        time.sleep(0.05)
