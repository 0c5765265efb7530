"""A guest as its owner sees it: booted, watched, tormented and killed."""

from __future__ import annotations

import os
import pickle
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.emulators.guests import ability, addresses, cloud_config, processes
from tests.emulators.guests.shapes import FakeGpu, Faults, GuestFailed
from tests.emulators.guests.spec import LISTEN, PATH, REBOOT, Spec

_REPOSITORY = Path(__file__).parents[3]
_PORT_OF_ANYBODY = 2222
_TICK_S = 0.01
_END_LIMIT_S = 20.0


class Guest:
    """One emulated machine with a real sshd.

    A virtual machine (Lambda, AWS) when there is no `entrypoint`: user-data is applied at every boot, `poweroff` works.
    A container (RunPod) with one: `entrypoint` is PID 1, restarted with the same disk whenever it ends; `poweroff`
    does not work in it, as in a real one. It dies with the process that booted it.
    """

    host: str
    """Where it listens: an address of its own in 127.0.0.0/8."""
    port: int
    """What was asked for; but 2222 for one below 1024 where the tests are not run by root."""
    user: str
    """Who logs in: the user asked for; but the user who runs the tests when it is no whole machine."""

    @classmethod
    def boot(
        cls,
        *,
        user: str,
        folder: Path,
        address: str | None = None,
        port: int = 22,
        authorized_keys: Sequence[str] = (),
        user_data: str = "",
        entrypoint: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        gpus: Sequence[FakeGpu] = (),
        on_poweroff: Callable[[], None] | None = None,
        on_halt: Callable[[], None] | None = None,
        boot_delay_s: float = 0.0,
        faults: Faults | None = None,
        strict: bool = False,
        python_path: Sequence[Path] = (),
    ) -> Guest:
        """Start a machine and return at once; `wait_ready` waits for its sshd.

        `folder` is the owner's: the console lies there, and nothing of the guest's disk. `authorized_keys` are lines of
        the user's authorized_keys (the key that a cloud injects; a container takes PUBLIC_KEY from its `env`).
        `on_poweroff` is called once, from another thread, after the guest has died by its own poweroff and not by
        `kill`; likewise `on_halt`. `strict` raises ValueError for user-data that real cloud-init knows and this one
        does not; without it the console tells. `python_path` goes in front of the path of /opt/pytorch/bin/python, the
        Python with torch.
        """
        if reason := ability.missing():
            raise GuestFailed(reason)
        folder.mkdir(parents=True, exist_ok=True)
        cloud = None if entrypoint else cloud_config.read(user_data, strict=strict)
        whole = not ability.whole()
        host, claim = addresses.take(address)
        spec = Spec(
            place=tempfile.mkdtemp(prefix="disk-", dir=folder),
            whole=whole,
            host=host,
            port=port if os.geteuid() == 0 or port >= 1024 else _PORT_OF_ANYBODY,
            user=user if whole else pwd.getpwuid(os.geteuid()).pw_name,
            authorized_keys=tuple(authorized_keys),
            cloud=cloud,
            entrypoint=tuple(entrypoint),
            env=dict(env or {}),
            session_env={name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ},
            gpus=tuple(gpus),
            boot_delay_s=boot_delay_s,
            faults=faults or Faults(),
            sshd=ability.sshd(),
            python=sys.executable,
            python_path=tuple(str(path) for path in python_path),
            kept=tuple(sorted({sys.prefix, sys.base_prefix, *map(str, python_path)})),
            owner_pid=os.getpid(),
        )
        with claim:
            return cls(spec, folder / "console.log", claim.fileno(), {"poweroff": on_poweroff, "halt": on_halt})

    def __init__(self, spec: Spec, console: Path, claim: int, on_end: Mapping[str, Callable[[], None] | None]) -> None:
        """Use `boot`."""
        self.host, self.port, self.user = spec.host, spec.port, spec.user
        self._spec, self._console, self._on_end = spec, console, on_end
        self._mounts, self._namespace = -1, ""
        self._lock = threading.Lock()
        self._killed = self._deaf = False
        self._up, self._ended, self._finished = threading.Event(), threading.Event(), threading.Event()
        self._servers: list[subprocess.Popen[bytes]] = []
        with open(console, "ab") as log:
            self._room = subprocess.Popen(
                [sys.executable, "-m", "tests.emulators.guests.room"],
                cwd=_REPOSITORY,
                env={"PATH": PATH, "LANG": "C.UTF-8", **({} if spec.whole else {"GUEST_MARK": spec.place})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[claim],
                start_new_session=True,
            )
        assert self._room.stdin is not None
        pickle.dump(spec, self._room.stdin)
        self._room.stdin.flush()
        threading.Thread(target=self._watch, name=f"guest-{self.host}", daemon=True).start()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    @property
    def alive(self) -> bool:
        """Return whether it is booting or runs, as frozen and deaf ones do."""
        return not (self._killed or self._ended.is_set())

    @property
    def ready(self) -> bool:
        """Return whether its sshd listens."""
        if not (self.alive and self._up.is_set()) or self._deaf:
            return False
        try:
            server = int((self.root / "run/sshd.pid").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return False
        return processes.lives(server, (self.root if self._spec.whole else Path("/")) / "proc")

    @property
    def log(self) -> str:
        """Return the console so far."""
        return self._console.read_text(encoding="utf-8", errors="replace")

    @property
    def pids(self) -> list[int]:
        """The ids, as this machine has them, of all processes in the guest."""
        if not self._spec.whole:
            return sorted(set(self._everything()) - {self._room.pid})
        return [pid for pid in self._everything() if processes.apart(pid)]

    @property
    def root(self) -> Path:
        """The guest's own `/`, to look into from outside while it lives."""
        return Path(f"/proc/{self._room.pid}/root") if self._spec.whole else self._spec.root

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until sshd listens. Raise GuestFailed with the console when it died or the time is over."""
        end = time.monotonic() + timeout_s
        while not self.ready:
            if not self.alive or time.monotonic() > end:
                raise GuestFailed(f"{'not ready in time' if self.alive else 'it died'}:\n{self.log[-4000:]}")
            time.sleep(_TICK_S)

    def wait_dead(self, timeout_s: float = 60.0) -> None:
        """Wait until it has died and its callback has returned. Raise GuestFailed when the time is over."""
        if not self._finished.wait(None if timeout_s == float("inf") else timeout_s):
            raise GuestFailed(f"it lives on:\n{self.log[-4000:]}")

    def kill(self) -> None:
        """End the whole guest at once: processes, mounts, disk. Return when they are gone; may be repeated."""
        with self._lock:
            self._killed = True
        if not self._spec.whole:  # Held, so that it does not restart what is killed; and it adopts what loses a parent.
            self._room.send_signal(signal.SIGSTOP)
            self._sweep()
        self._room.kill()
        if not self._ended.wait(_END_LIMIT_S):
            raise GuestFailed(f"it cannot be ended:\n{self.log[-4000:]}")

    def reboot(self) -> None:
        """Kill all its processes and boot again with the same disk, as a restart by the provider does."""
        old = set(self.pids)
        self._ask(REBOOT)
        for _ in self._patiently("it does not restart"):
            if not old & set(self.pids):
                return

    def freeze(self) -> None:
        """Stop every process: connections stay and nobody answers, as when the network has died."""
        for _ in self._patiently("it cannot be frozen"):
            running = [pid for pid in self.pids if not processes.is_stopped(pid)]
            if not running:
                return
            processes.send(running, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the processes of a frozen guest go on."""
        processes.send(self.pids, signal.SIGCONT)

    def deaf(self) -> None:
        """Cut every connection and refuse new ones; what else runs in the guest goes on."""
        self._deaf = True
        for _ in self._patiently("its sshd cannot be ended"):
            servers = [pid for pid in self.pids if processes.command(pid).startswith("sshd")]
            if not servers:
                (self.root / "run/sshd.pid").unlink(missing_ok=True)
                return
            processes.send(servers, signal.SIGKILL)

    def hear(self) -> None:
        """Let a deaf guest accept connections again."""
        if self._spec.whole:
            first = next(pid for pid in self.pids if processes.number_inside(pid) == 1)
            spaces = ["--mount", "--uts", "--ipc", "--pid", "--root", "--wd"]
            with open(self._console, "ab") as log:
                server = subprocess.Popen(
                    ["nsenter", f"--target={first}", *spaces, "guest-sshd"],
                    env=self._spec.base_env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            self._servers.append(server)
        else:
            self._ask(LISTEN)
        self._deaf = False

    def _ask(self, word: bytes) -> None:
        assert self._room.stdin is not None
        self._room.stdin.write(word)
        self._room.stdin.flush()

    def _watch(self) -> None:
        """Follow the room until it ends, clear away what is left, and tell the observer."""
        how = "died"
        assert self._room.stdout is not None
        for line in self._room.stdout:
            word = line.decode().strip()
            if word == "up":
                self._hold_namespace()
                self._up.set()
            else:
                how = word
        self._room.wait()
        self._sweep()
        self._namespace = ""
        self._ended.set()
        if self._mounts >= 0:
            os.close(self._mounts)
        for server in self._servers:
            server.wait()
        shutil.rmtree(self._spec.place, ignore_errors=True)
        with self._lock:
            call = None if self._killed else self._on_end.get(how)
        if call is not None:
            call()
        self._finished.set()

    def _hold_namespace(self) -> None:
        """Keep the name of the guest's mounts from being given to another guest before the last process is found."""
        if self._spec.whole:
            with suppress(OSError):  # It ends already, and its processes with it.
                self._mounts = os.open(f"/proc/{self._room.pid}/ns/mnt", os.O_RDONLY)
                self._namespace = os.readlink(f"/proc/self/fd/{self._mounts}")

    def _everything(self) -> list[int]:
        """Return all processes of the guest, and those that hold it."""
        if self._ended.is_set():
            return []
        if self._spec.whole:
            return processes.in_namespace(self._namespace) if self._namespace else []
        return [*processes.descendants(self._room.pid), *processes.with_mark(self._spec.place)]

    def _sweep(self) -> None:
        """Kill until nothing is left, and look once more: who is changing parents may be overlooked."""
        looks = 0
        for _ in self._patiently("processes of it cannot be ended"):
            left = set(self._everything()) - ({self._room.pid} if not self._spec.whole else set())
            looks = 0 if left else looks + 1
            if looks == 2:
                return
            processes.send(left, signal.SIGKILL)

    def _patiently(self, what: str) -> Iterator[None]:
        """Try again and again, with short pauses, until GuestFailed."""
        end = time.monotonic() + _END_LIMIT_S
        while time.monotonic() < end:
            yield
            time.sleep(_TICK_S)
        raise GuestFailed(f"{what}:\n{self.log[-4000:]}")
