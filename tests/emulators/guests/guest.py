"""One guest as its owner controls it: booted, watched, disturbed and killed."""

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

    Without an `entrypoint` it is a virtual machine (Lambda, AWS): user-data is applied at every boot, and `poweroff`
    works. With an `entrypoint` it is a container (RunPod): this program is PID 1, and is restarted with the same disk
    whenever it ends; `poweroff` does not work, as in a real container. A guest dies with the process that booted it.
    """

    host: str
    """The address on which it listens: one in 127.0.0.0/8 that no other guest has."""
    port: int
    """The requested port; 2222 in place of a port below 1024 if root does not run the tests."""
    user: str
    """The user who logs in: the requested user, or the user who runs the tests if it is not a whole machine."""

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
        """Start a machine and return immediately; `wait_ready` waits for its sshd.

        `folder` belongs to the owner and gets the console. sshd listens on `address` and `port`; without an address, on
        a free one. `authorized_keys` are lines of the user's authorized_keys, as a cloud injects them; a container gets
        PUBLIC_KEY in its `env` instead. `on_poweroff` is called once, from another thread, after the guest has died by
        its own poweroff and not by `kill`; likewise `on_halt` after a halt. With `strict`, raise ValueError for
        user-data that is not understood; otherwise the console reports it. `python_path` goes in front of the module
        path of /opt/pytorch/bin/python, the Python with torch.
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
        """Start the guest of `spec`; only `boot` may call this."""
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
        """Return whether the guest boots or runs; a frozen or deaf guest is alive."""
        return not (self._killed or self._ended.is_set())

    @property
    def ready(self) -> bool:
        """Return whether the guest's sshd listens."""
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
        """Return the ids of all processes in the guest, as this computer numbers them."""
        if not self._spec.whole:
            return sorted(set(self._list_processes()) - {self._room.pid})
        return [pid for pid in self._list_processes() if processes.apart(pid)]

    @property
    def root(self) -> Path:
        """Return the path of the guest's `/` outside the guest; it is valid while the guest lives."""
        return Path(f"/proc/{self._room.pid}/root") if self._spec.whole else self._spec.root

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until sshd listens. Raise GuestFailed with the console if the guest dies or the time is over."""
        end = time.monotonic() + timeout_s
        while not self.ready:
            if not self.alive or time.monotonic() > end:
                raise GuestFailed(f"{'not ready in time' if self.alive else 'it died'}:\n{self.log[-4000:]}")
            time.sleep(_TICK_S)

    def wait_dead(self, timeout_s: float = 60.0) -> None:
        """Wait until the guest has died and its callback has returned. Raise GuestFailed if the time is over."""
        if not self._finished.wait(None if timeout_s == float("inf") else timeout_s):
            raise GuestFailed(f"it lives on:\n{self.log[-4000:]}")

    def kill(self) -> None:
        """End the guest with its processes, mounts and disk; return when they are gone. A second call is harmless."""
        with self._lock:
            self._killed = True
        if not self._spec.whole:  # The stopped room restarts nothing, and still adopts orphans.
            self._room.send_signal(signal.SIGSTOP)
            self._sweep()
        self._room.kill()
        if not self._ended.wait(_END_LIMIT_S):
            raise GuestFailed(f"it cannot be ended:\n{self.log[-4000:]}")

    def reboot(self) -> None:
        """Kill all processes and boot again with the same disk, as a restart by the provider does."""
        old = set(self.pids)
        self._ask(REBOOT)
        for _ in self._patiently("it does not restart"):
            if not old & set(self.pids):
                return

    def freeze(self) -> None:
        """Stop every process: connections stay open without an answer, as when the network has died."""
        for _ in self._patiently("it cannot be frozen"):
            running = [pid for pid in self.pids if not processes.is_stopped(pid)]
            if not running:
                return
            processes.send(running, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the processes of a frozen guest continue."""
        processes.send(self.pids, signal.SIGCONT)

    def deaf(self) -> None:
        """Kill every sshd: connections are cut and new ones refused, while all other processes continue."""
        self._deaf = True
        for _ in self._patiently("its sshd cannot be ended"):
            servers = [pid for pid in self.pids if processes.command(pid).startswith("sshd")]
            if not servers:
                (self.root / "run/sshd.pid").unlink(missing_ok=True)
                return
            processes.send(servers, signal.SIGKILL)

    def hear(self) -> None:
        """Start sshd again in a deaf guest."""
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
        """Follow the room until it ends, remove what it left, and call the callback for this end."""
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
        """Hold the mount namespace open, so that no other guest gets its name before the last process is found."""
        if self._spec.whole:
            with suppress(OSError):  # The guest has already ended.
                self._mounts = os.open(f"/proc/{self._room.pid}/ns/mnt", os.O_RDONLY)
                self._namespace = os.readlink(f"/proc/self/fd/{self._mounts}")

    def _list_processes(self) -> list[int]:
        """Return all processes of the guest, including the room."""
        if self._ended.is_set():
            return []
        if self._spec.whole:
            return processes.in_namespace(self._namespace) if self._namespace else []
        return [*processes.descendants(self._room.pid), *processes.with_mark(self._spec.place)]

    def _sweep(self) -> None:
        """Kill processes until two looks in a row find none; a look can miss a process that is changing its parent."""
        looks = 0
        for _ in self._patiently("processes of it cannot be ended"):
            left = set(self._list_processes()) - ({self._room.pid} if not self._spec.whole else set())
            looks = 0 if left else looks + 1
            if looks == 2:
                return
            processes.send(left, signal.SIGKILL)

    def _patiently(self, what: str) -> Iterator[None]:
        """Yield again and again with short pauses; raise GuestFailed when the time is over."""
        end = time.monotonic() + _END_LIMIT_S
        while time.monotonic() < end:
            yield
            time.sleep(_TICK_S)
        raise GuestFailed(f"{what}:\n{self.log[-4000:]}")
