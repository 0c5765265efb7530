"""An emulated cloud with its meter, and a user who types commands: what every test of a whole rental needs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.journal_records import Event
from gpurun.core.secrets import child_environment
from gpurun.ledger.journal import read_journal
from tests.emulators.guests import FakeGpu, Faults, Guest, Meter

SMALL = ("--set", "train.steps=60", "--set", "train.batch_tokens=1024", "--set", "train.micro_batch=16",
         "--set", "train.checkpoint_every=30", "--set", "eval.every=30", "--set", "eval.tokens=2048")  # fmt: skip
"""Settings that make the first lab smaller than its rehearsal, because these tests are about the rental."""


@dataclass
class Cloud:
    """One emulated cloud: how a user reaches it, its meter, and the machines that really live there."""

    name: str
    environment: Mapping[str, str]
    meter: Meter
    alive: Callable[[], Sequence[object]]
    asks: tuple[str, ...] = ()
    """The flags that a user must add to `--provider NAME`."""
    emulator: Any = None
    """The emulator: a test makes it misbehave, and reads the requests that it received."""
    guests: list[Guest] = field(default_factory=list)
    """The booted machines in their order; empty for a cloud that only claims to boot them."""

    def remembers(self, boot: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that boots as `boot` does and adds each machine to `guests`, for tests to inspect."""

        def booted(wanted: Any) -> Any:
            guest = boot(wanted)
            self.guests.append(guest)
            return guest

        return booted


@dataclass
class User:
    """A user who types gpurun commands and has their own home."""

    cloud: Cloud
    home: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """Return the environment of the user's shell: their home and their keys for this cloud, no other key."""
        extra = {"GPURUN_HOME": str(self.home), "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(self.home)}
        return child_environment({**extra, **self.cloud.environment})

    def types(self, *words: str, timeout_s: float = 240.0, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end, with `more` in its environment."""
        command, environment = [sys.executable, "-m", "gpurun.cli.app", *words], {**self.environment(), **more}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )

    def trains(self, *more: str, name: str = "fox-41", timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run `gpurun train mini-gpt` on the cloud, with a cap of five dollars."""
        return self.types(*self._training(*more, name=name), timeout_s=timeout_s)

    def begins(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the same with `--detach`; return once it has a supervisor, while it still waits for its machine."""
        command = [sys.executable, "-m", "gpurun.cli.app", *self._training(*more, "--detach")]
        silent = subprocess.DEVNULL
        begun = subprocess.Popen(command, env=self.environment(), stdin=silent, stdout=silent, stderr=silent)
        assert any(supervisors(self.home) for _ in ticks(SystemClock(), 0.02, 60)), self.said()
        return begun

    def resumes(self, name: str) -> subprocess.Popen[bytes]:
        """Start `gpurun resume`; return once the run has a supervisor again."""
        command, silent = [sys.executable, "-m", "gpurun.cli.app", "resume", name], subprocess.DEVNULL
        begun = subprocess.Popen(command, env=self.environment(), stdin=silent, stdout=silent, stderr=silent)
        assert any(supervisors(self.home) for _ in ticks(SystemClock(), 0.02, 60)), self.said(name)
        return begun

    def _training(self, *more: str, name: str = "fox-41") -> list[str]:
        return ["train", "mini-gpt", "--provider", self.cloud.name, "--max-cost", "5", "--yes", "--json",
                "--name", name, *self.cloud.asks, *SMALL, *more]  # fmt: skip

    def envelope(self, *words: str) -> tuple[int, Any]:
        """Run one command with --json; return its exit code and its JSON envelope."""
        done = self.types(*words, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    def events(self, name: str = "fox-41") -> list[Event]:
        """Return the events of the run's journal, in order."""
        return [record.event for record in read_journal(self.home / "runs" / name / "journal.jsonl").records]

    def said(self, name: str = "fox-41") -> str:
        """Return the ends of a run's logs and journal, for the message of a test that fails."""
        folder = self.home / "runs" / name
        logs = [folder / "supervisor.log", folder / "run.log", folder / "journal.jsonl"]
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())


def supervisors(home: Path) -> list[int]:
    """Return the process ids of a home's supervisors, found by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"gpurun.lifecycle.supervisor" in words and str(home).encode() in words:
                found.append(int(entry.name))
    return found


@contextmanager
def somebody(cloud: Cloud, home: Path) -> Iterator[User]:
    """Yield a user whose supervisors end with the test."""
    user = User(cloud, home)
    try:
        yield user
    finally:
        kill_supervisors(home)


def kill_supervisors(home: Path) -> None:
    """Send SIGKILL to a home's supervisors until none is left, for at most ten seconds."""
    for _ in ticks(SystemClock(), 0.05, 10):
        left = supervisors(home)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    raise AssertionError(f"supervisors outlived SIGKILL: {supervisors(home)}")


Opened = Callable[[Path], AbstractContextManager[Cloud]]


def container(folder: Path, faults: Faults, gpus: Sequence[FakeGpu] | None, path: Sequence[Path]) -> Callable[..., Any]:
    """Return a function that boots RunPod's containers with these faults.

    `gpus` replaces the GPUs that were rented; `path` precedes torch's own path in the machine's Python.
    """

    def boot(wanted: Any) -> Guest:
        rented = [FakeGpu(name=wanted.gpu, memory_mib=wanted.gpu_memory_gb * 1024)] * wanted.gpu_count
        return Guest.boot(
            user="root", folder=folder / wanted.env["RUNPOD_POD_ID"], port=20_000 + secrets.randbelow(40_000),
            entrypoint=wanted.command, env=wanted.env, gpus=rented if gpus is None else gpus, faults=faults,
            python_path=path,
        )  # fmt: skip

    return boot


@contextmanager
def runpod(
    folder: Path, faults: Faults | None = None, gpus: Sequence[FakeGpu] | None = None, path: Sequence[Path] = ()
) -> Iterator[Cloud]:
    """Yield RunPod with real containers."""
    from tests.emulators.runpod import FULL_KEY, RunPodEmulator

    with RunPodEmulator() as emulator:
        environment = {"RUNPOD_API_BASE_URL": emulator.base_url, "RUNPOD_API_KEY": FULL_KEY}
        alive = lambda: emulator.world.alive  # noqa: E731
        cloud = Cloud("runpod", environment, emulator.world.meter, alive, ("--accept-cpu", "--gpu", "1xA100"), emulator)
        emulator.world.boot = cloud.remembers(container(folder, faults or Faults(), gpus, path))
        yield cloud
        assert emulator.violations == [], emulator.violations[:5]


@contextmanager
def lambda_cloud(folder: Path) -> Iterator[Cloud]:
    """Yield Lambda with real machines; `--lambda-guard` puts a key on each so that it can end itself."""
    from tests.emulators.lambda_cloud import KEY, LambdaEmulator, real_guest

    with LambdaEmulator() as emulator:
        environment = {"LAMBDA_API_BASE_URL": emulator.base_url, "LAMBDA_API_KEY": KEY}
        asks = ("--accept-cpu", "--lambda-guard", "--gpu", "1xA10")
        cloud = Cloud("lambda", environment, emulator.world.meter, lambda: emulator.world.alive, asks, emulator)
        emulator.world.boot = cloud.remembers(real_guest(folder))
        yield cloud
        assert emulator.violations == [], emulator.violations[:5]


@contextmanager
def aws(folder: Path) -> Iterator[Cloud]:
    """Yield AWS with real machines; it rents no single A100, so the first lab trains on a machine without a GPU."""
    from tests.emulators.aws import AwsEmulator, real_guest

    with AwsEmulator() as emulator:
        alive, asks = lambda: emulator.world.alive, ("--gpu", "cpu")
        cloud = Cloud("aws", emulator.environment, emulator.world.meter, alive, asks, emulator)
        emulator.world.boot = cloud.remembers(real_guest(folder))
        yield cloud


CLOUDS: dict[str, Opened] = {"runpod": runpod, "lambda": lambda_cloud, "aws": aws}
