"""The process that holds one guest: its namespaces, its disk, and its lives, one after the other.

Its owner sends a `Spec` and keeps the pipe open; when the pipe or the owner ends, the guest ends too. The owner gets
a line `up` once the disk is ready, then a line with how the guest ended.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

from tests.emulators.guests import first_process, furnish, kernel, processes
from tests.emulators.guests.disk import assemble
from tests.emulators.guests.spec import LISTEN, PATH, REBOOT, Spec

_RESTART_PAUSE_S = 0.2
_ENDS = {first_process.HALT: "halt", first_process.POWER_OFF: "poweroff"}


def main() -> None:
    """Hold the guest whose Spec arrives on standard input; --try tests whether a whole machine is possible here."""
    if sys.argv[1:] == ["--try"]:
        with tempfile.TemporaryDirectory() as folder:
            _leave()
            assemble(Path(folder), size_mb=1, kept=())
            kernel.unmount(folder)
        return
    events = os.dup(1)
    os.dup2(2, 1)  # What is printed goes to the console.

    def tell(event: str) -> None:
        os.write(events, event.encode() + b"\n")

    spec: Spec = pickle.load(sys.stdin.buffer)
    owner = os.pidfd_open(spec.owner_pid)
    if os.getppid() != spec.owner_pid:
        return
    try:
        _move_in(spec)
    except Exception:  # noqa: BLE001 - the console is the only place that can hear of it
        traceback.print_exc()
        tell("failed")
        return
    tell("up")
    tell(_hold(spec, owner))


def _leave() -> None:
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_HOSTNAME | kernel.NEW_IPC)


def _move_in(spec: Spec) -> None:
    """Move this process into the guest's namespaces and root, and fill its file system."""
    programs = furnish.shims()
    if spec.whole:
        _leave()
        root = assemble(Path(spec.place), size_mb=spec.faults.disk_mb, kept=spec.kept)
        os.chroot(root)
        os.chdir("/")
        socket.sethostname(f"guest-{spec.host.replace('.', '-')}")
    else:
        kernel.adopt_orphans()
    os.environ.clear()
    os.environ["PATH"] = PATH
    furnish.furnish(spec, programs)


def _hold(spec: Spec, owner: int) -> str:
    """Start one life after another until the owner or the machine ends; return how it ended."""
    first_boot = True
    while True:
        life = _start_life(spec, first_boot)
        ended = os.pidfd_open(life)
        why = _wait(spec, owner, ended)
        if why != "ended":
            os.kill(life, signal.SIGTERM if spec.whole else signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(life, 0)[1])
        os.close(ended)
        if not spec.whole:
            _end_descendants()
        if why == "abandoned":
            return why
        if why == "ended" and not spec.is_container and code != first_process.REBOOT:
            return _ENDS.get(code, "died")
        print(f"guest: the first process ended with {code}; it is started again", flush=True)
        first_boot = False
        time.sleep(_RESTART_PAUSE_S)


def _wait(spec: Spec, owner: int, ended: int) -> str:
    """Wait until a life is over, and return why.

    "ended": the first process ended; "reboot": the owner requests a reboot; "abandoned": the owner is gone.
    """
    while True:
        ready, _, _ = select.select([0, owner, ended], [], [])
        word = os.read(0, 1) if 0 in ready else None
        if owner in ready or word == b"":
            return "abandoned"
        if ended in ready:
            return "ended"
        if word == REBOOT:
            return "reboot"
        if word == LISTEN:
            subprocess.Popen(["guest-sshd"], env=spec.base_env, stdin=subprocess.DEVNULL, start_new_session=True)


def _start_life(spec: Spec, first_boot: bool) -> int:
    """Start the guest's first process; return the id of a process that ends with it and with the same exit code."""
    life = kernel.fork_bound()
    if life:
        return life
    try:
        if first_boot:
            time.sleep(spec.boot_delay_s)
        if spec.whole:
            _fork_into_own_pids()
        os.closerange(3, 1 << 16)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        first_process.run(spec, first_boot=first_boot)
    except BaseException:  # noqa: BLE001 - a copy of this process must never go on
        traceback.print_exc()
    finally:
        os._exit(1)


def _fork_into_own_pids() -> None:
    """Return in process 1 of a new PID namespace; the calling process waits for process 1 and exits with its code.

    On SIGTERM the calling process ends only after the whole namespace, so that nothing in it still holds an address.
    """
    kernel.unshare(kernel.NEW_PIDS)
    first = kernel.fork_bound()
    if first == 0:
        kernel.mount("proc", "/proc", "proc")
        return

    def end_all(_: int, __: FrameType | None) -> None:
        processes.send([first], signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_all)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _end_descendants() -> None:
    """Kill what is left of a life without namespaces, until two looks in a row find nothing.

    A look can miss a process that is changing its parent.
    """
    looks = 0
    while looks < 2:
        left = processes.descendants(os.getpid())
        looks = 0 if left else looks + 1
        processes.send(left, signal.SIGKILL)
        time.sleep(0.005)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
