"""The first process of a guest: the container's own program, or the init of a virtual machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import traceback

from tests.emulators.guests import cloud_init, kernel, processes
from tests.emulators.guests.furnish import home_of
from tests.emulators.guests.spec import Spec

HALT, POWER_OFF, REBOOT = 37, 38, 39
"""Signals that end the machine, as in systemd (SIGRTMIN+3 to +5); the init exits with these numbers, too."""
_ENDS = {HALT, POWER_OFF, REBOOT}
_GRACE_S = 0.5


def run(spec: Spec, *, first_boot: bool) -> None:
    """Turn this process into the first process of a guest that begins a life on its disk. Never return."""
    os.setsid()
    os.chdir(spec.root)
    (spec.root / "run/sshd.pid").unlink(missing_ok=True)
    (spec.root / "run/guest-init").write_text(str(os.getpid()), encoding="utf-8")
    if spec.is_container:
        _become(spec)
    _be_init(spec, first_boot)


def _become(spec: Spec) -> None:
    """Replace this process with the container's program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    start = str(spec.root / "start.sh")
    argv = [start if word == "/start.sh" else word for word in spec.entrypoint]
    try:
        os.execvpe(argv[0], argv, {**spec.base_env, **spec.env})
    except OSError as error:
        print(f"{argv[0]}: {error}", flush=True)
        os._exit(127)


def _be_init(spec: Spec, first_boot: bool) -> None:
    """Boot in a child, reap dead processes, and end the machine when a signal requests it."""
    kernel.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_ENDS})
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        try:
            _boot(spec, first_boot)
        except BaseException:  # noqa: BLE001 - the console is the only place that can hear of it
            traceback.print_exc()
        os._exit(0)
    while (number := signal.sigwait({signal.SIGCHLD, *_ENDS})) not in _ENDS:
        _collect_dead()
    processes.send(processes.descendants(os.getpid()), signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while _collect_dead() and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(number)


def _collect_dead() -> bool:
    """Reap the children that have ended; return whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def _boot(spec: Spec, first_boot: bool) -> None:
    """Do what cloud-init and the start of the system do."""
    assert spec.cloud is not None
    state = spec.root / "run/systemd"
    for stale in [*state.glob("transient/*"), *state.glob("*.pid")]:
        stale.unlink()
    (state / "system").mkdir(parents=True, exist_ok=True)
    cloud_init.before_sshd(spec, first_boot=first_boot)
    if first_boot:
        cloud_init.let_in(spec.cloud, home_of(spec), spec.user)
    subprocess.Popen(["guest-sshd"], env=spec.base_env, stdin=subprocess.DEVNULL)
    cloud_init.after_sshd(spec, first_boot=first_boot)
