"""A simulated cloud that follows a script, with a simulated agent and trainer whose answers the test sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.journal_records import Event, Record, RunState
from gpurun.core.money import Micros, cost_of, times, usd
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState, Order, Teardown
from gpurun.core.run_plan import Lease, Mode, Plan
from gpurun.ledger.journal import Journal, read_journal
from gpurun.ledger.run_state import replay_journal
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver
from gpurun.providers.base import Traits
from gpurun.remote import messages
from gpurun.remote.archive import Codec, Pack
from gpurun.remote.client import Chunk, FarSide, Poll
from gpurun.remote.download import WantedFile, fetch
from gpurun.remote.interface import MachineLost
from gpurun.remote.machine_facts import Gpu, MachineFacts, Torch
from gpurun.remote.messages import (
    Best,
    EndAnswer,
    Manifest,
    ManifestFile,
    SetUp,
    Shipped,
    Started,
    Status,
    understood_manifest,
)
from tests.changed_plan import changed_plan
from tests.emulators.fake import Box, FakeCloud, Fault, Profile
from tests.emulators.fake.cloud import CALL_S
from tests.lifecycle.drive import TINY
from tests.lifecycle.tiny_runs import make_run
from tests.tensor_file import as_tensors

BOOT_S = 12.0
MOST_CALLS = 20_000
RATE = usd(2)
CARD = "NVIDIA A100-SXM4-80GB"
LEASE = Lease(boot_s=120, ship_s=60, train_s=300, collect_s=60, destroy_s=60, kill_allowance_s=60)
# WEIGHTS: the best checkpoint and the latest, which are downloaded. SPARE: the checkpoint before the latest, which
# stays on the machine unless the latest is damaged. Each file has 5,000 bytes.
WEIGHTS = [
    ("checkpoints/000020.model.safetensors", as_tensors(b"\x14" * 4926), 20),
    ("checkpoints/000030.model.safetensors", as_tensors(b"\x1e" * 4926), 30),
    ("checkpoints/000030.optim.safetensors", as_tensors(b"\x1f" * 4926), 30),
]
SPARE = ("checkpoints/000025.model.safetensors", as_tensors(b"\x19" * 4926), 25)
FINISHED = [*WEIGHTS, SPARE]
TRAITS = Traits(120.0, 5.0, 3, 30.0, Teardown.DESTROYED, "https://console.example")
PLAIN = Profile("local", TRAITS, idempotent=False, timer="none", tells_rate=True, boot_s=BOOT_S, timeout_s=0.0)


class Killed(BaseException):
    """Raised where the supervisor is killed, as by SIGKILL. gpurun does not handle it."""


class Endless(BaseException):
    """Raised after MOST_CALLS calls, because faulty code might otherwise repeat its calls forever."""


class ScriptedCloud(FakeCloud):
    """A simulated cloud that has no real provider's peculiarities: it does exactly what the test's script says."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(PLAIN, clock)
        self.passing = self._pass
        self.calls = 0
        self.killing = ""  # "before create", "after destroy", ...: the point at which the supervisor is killed, once
        self.broken: dict[str, Exception] = {}  # verb -> the error that its calls raise, until the test removes it
        self.reads: list[InstanceState] = []  # the states that the next reads return, true or not
        self.rate, self.gpu = RATE, "A100"
        self.reported_rate: Callable[[str], Micros | None] = lambda verb: RATE

    @property
    def creates(self) -> list[str]:
        """Return the scripted faults of the next create calls, in order. After the last one, creates succeed."""
        return [str(fault) for fault in self.script.get("create", [])]

    @creates.setter
    def creates(self, words: list[str]) -> None:
        self.script["create"] = [Fault(word) for word in words]

    @property
    def created(self) -> int:
        return sum(verb == "create" for _, verb, _ in self.history)

    @property
    def deaf_destroys(self) -> int:
        return len(self.script.get("destroy", []))

    @deaf_destroys.setter
    def deaf_destroys(self, count: int) -> None:
        self.script["destroy"] = [Fault.DEAF] * count

    @property
    def list_lag_s(self) -> float:
        return self.profile.list_lag_s

    @list_lag_s.setter
    def list_lag_s(self, lag_s: float) -> None:
        self.profile = replace(self.profile, list_lag_s=lag_s)

    def read(self, instance_id: str) -> Instance:
        instance = super().read(instance_id)
        return instance.model_copy(update={"state": self.reads.pop(0)}) if self.reads else instance

    def _make(self, order: Order, fault: Fault, at_s: float) -> Box:
        box = super()._make(order, fault, at_s)
        box.rate, box.gpu = self.rate, self.gpu
        return box

    def _told_rate(self, box: Box, verb: str) -> Micros | None:
        return self.reported_rate(verb)

    def _pass(self, place: str) -> None:
        """Kill the supervisor or raise the scripted error if the script names this point of a call."""
        if self.killing == place:
            self.killing = ""
            raise Killed(place)
        when, verb = place.split(" ", 1)
        if when == "before":
            self.calls += 1
            if self.calls > MOST_CALLS:
                raise Endless(verb)
            if verb in self.broken:
                self.clock.sleep(CALL_S)
                raise self.broken[verb]


class ScriptedFar(FarSide):
    """A simulated agent and trainer: no process runs, the test sets the answers.

    `during` is called before every poll.
    """

    def __init__(self, cloud: FakeCloud) -> None:
        self.cloud, self.clock, self.card_name = cloud, cloud.clock, CARD
        self.train_s, self.started_s, self.stopped = 60.0, -1.0, ""
        self.broken: dict[str, Exception] = {}
        self.broken_times: dict[str, int] = {}
        self.during: Callable[[], None] = lambda: None
        self.get_s, self.get_most = CALL_S, 1 << 20
        self.polls = 0
        self.behind = 0
        self.shortened: list[tuple[float, float]] = []
        self.flips: dict[str, int] = {}  # How many more downloads of a file end with a wrong byte.
        self.setup_takes_s, self.setup_begun_s = 0.0, -1.0
        self.setup_limits_s: list[float] = []
        self.reached = ""  # The id of the machine that gpurun connected to; empty if a test does not set it.

    def answers(self, limit_s: float) -> bool:
        try:
            self._call("answers")
        except MachineLost:
            return False
        return not self.reached or any(box.id == self.reached for box in self.cloud.alive)

    def install_agent(self) -> None:
        self._call("install_agent")

    def hello(self, python: str | None = None, **_: Any) -> MachineFacts:
        self._call("hello")
        card = Gpu(name=self.card_name, memory_bytes=80 << 30)
        torch = Torch(found=True, python="/py", version="2.13", numpy="2.1", cuda="13.0", devices=(card,))
        return MachineFacts(
            v=1, python="3.12", platform="Linux", cpus=8, memory_bytes=1 << 36, disk_free_bytes=1 << 40,
            codecs=("zstd", "gzip"), wall=self.clock.wall(), boot_id="far", shipped_sha256=None, torch=torch,
        )  # fmt: skip

    def set_up(self, script: bytes, *, limit_s: float, offset: int, most: int) -> tuple[SetUp, bytes]:
        self._call("set_up")
        if self.setup_begun_s < 0:
            self.setup_begun_s = self.clock.monotonic()
            self.setup_limits_s.append(limit_s)
        ran_s = self.clock.monotonic() - self.setup_begun_s
        is_on, log = ran_s < self.setup_takes_s, b"working\n"
        part = log[offset : offset + most]
        return SetUp(
            state="running" if is_on else "ended", ran_s=ran_s, exit_code=None if is_on else 0, signal=None,
            size=len(log), bytes=len(part), tail=log.decode(),
        ), part  # fmt: skip

    def unpack(
        self,
        pack: Pack,
        codec: Codec = "zstd",
        *,
        on_progress: Callable[[int], None] | None = None,
        timeout_s: float = 3600.0,
    ) -> Shipped:
        self._call("unpack")
        if on_progress is not None:
            on_progress(1)
        return Shipped(files=len(pack.survey.files), bytes=pack.survey.total_bytes, manifest_sha256=pack.name())

    def start(self, job: Mapping[str, Any]) -> Started:
        self._call("start")
        already, self.started_s = self.started_s >= 0, max(self.started_s, self.clock.monotonic())
        return Started(keeper_pid=7, already=already, started_wall=self.clock.wall())

    def poll(self, wants: Mapping[str, tuple[int, int]]) -> Poll:
        self.polls += 1
        self.during()
        self._call("poll")
        story = b"".join(json.dumps(event).encode() + b"\n" for event in self._events())
        data = {"events.jsonl": story, "trainer.log": b"device: cuda\n"}
        chunks = {n: Chunk(at, data[n][at : at + most], len(data[n]) + self.behind) for n, (at, most) in wants.items()}
        ended = self._has_ended
        status = Status(
            v=1, state="exited" if ended else "running", wall=self.clock.wall(), pid=8, started_wall=1.0,
            exit_code=0 if ended else None, signal=None, stop_reason=self.stopped or None, soft_stop_wall=None,
            hard_stop_wall=None,
        )  # fmt: skip
        return Poll(status, chunks)

    def stop(self, *, now: bool = False, reason: str = "user") -> bool:
        self._call("stop")
        self.stopped = reason
        return True

    def shorten(self, soft_stop_wall: float, hard_stop_wall: float) -> messages.LeaseAnswer:
        self._call("shorten")
        self.shortened.append((soft_stop_wall, hard_stop_wall))
        return messages.LeaseAnswer(soft_stop_wall=soft_stop_wall, hard_stop_wall=hard_stop_wall)

    def end(self, folder: str, at_wall: float = 0.0) -> EndAnswer:
        self._call("end")
        ends_wall = self.cloud.bring_forward(self._box(), at_wall)
        taken = ends_wall is not None
        message = "" if taken else f"no timer has written to {folder}"
        return EndAnswer(taken=taken, deadline=int(ends_wall) if ends_wall is not None else None, message=message)

    def _box(self) -> str:
        """Return the id of the first machine that lives, or an empty string."""
        return next((box.id for box in self.cloud.alive), "")

    def manifest(self, most_bytes: int) -> Manifest:
        self._call("manifest")
        files = [
            ManifestFile(
                name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), step=step,
                kind="optimizer" if ".optim." in name else "weights",
            )
            for name, data, step in FINISHED
        ]  # fmt: skip
        listed = Manifest(latest=30, best=Best(step=20, val_loss=2.0), files=tuple(files))
        return understood_manifest(listed.model_dump_json().encode(), most_bytes)

    def fetch(
        self,
        name: str,
        size_bytes: int,
        sha256: str,
        into: Path,
        *,
        on_progress: Callable[[int], None] | None = None,
        aside: bool = False,
    ) -> Path:
        content = next(data for known, data, _ in FINISHED if known == name)

        def get(offset: int, most: int) -> bytes:
            self._call(f"get {name}")
            self.clock.sleep(self.get_s)
            part = content[offset : offset + min(most, self.get_most)]
            if self.flips.get(name) and offset + len(part) == len(content):
                self.flips[name] -= 1
                return part[:-1] + bytes([part[-1] ^ 1])
            return part

        wanted = WantedFile(name, size_bytes, sha256, on_progress, aside)
        return fetch(wanted, into, lambda offset, most, take: take(get(offset, most)))

    @property
    def _has_ended(self) -> bool:
        return bool(self.stopped) or self.clock.monotonic() - self.started_s >= self.train_s

    def _events(self) -> list[dict[str, Any]]:
        on = {"device": "cuda", "cuda_name": self.card_name}
        start = {"kind": "start", "wall": 1.0, "elapsed_s": 0.0, "step": 0, **on}
        stop = {"kind": "stop", "reason": "signal" if self.stopped else "done", "message": "", "step": 30}
        return [start, stop] if self._has_ended else [start]

    def _call(self, verb: str) -> None:
        self.cloud.passing(f"before far.{verb}")
        self.clock.sleep(CALL_S)
        left = self.broken_times.get(verb, MOST_CALLS)
        if verb in self.broken and left > 0:
            self.broken_times[verb] = left - 1
            raise self.broken[verb]
        if not self.cloud.alive:
            raise MachineLost("nobody answers")


class World:
    """A paid run on the scripted cloud, with a cap that pays for two machines."""

    def __init__(self, home: Home, lease: Lease = LEASE) -> None:
        self.home, self.clock = home, VirtualClock()
        self.folder = make_run(home, lease=lease)
        self.cloud = ScriptedCloud(self.clock)
        self.far = ScriptedFar(self.cloud)
        self.reach: Callable[[Instance], FarSide] = self._reach
        plan = Plan.from_json(self.folder.plan.read_bytes())
        offer = plan.offer.model_copy(update={"gpu": "A100", "gpu_count": 1, "rate_micros_per_hour": RATE})
        worst = cost_of(RATE, lease.total_s + lease.kill_allowance_s, offer.billing_unit_s)
        resolved = {**plan.job.resolved, "hardware": {"disk_gb": 50}}
        changes = {"offer": offer, "mode": Mode.PAID, "resolved": resolved}
        changes |= {"cap_micros": times(worst, 2), "worst_micros": worst}
        self.plan = changed_plan(plan, changes)
        self.folder.plan.write_text(self.plan.to_json())

    @property
    def context(self) -> Context:
        """Return the context that a supervisor works with."""
        return Context(
            home=self.home,
            folder=self.folder,
            plan=Plan.from_json(self.folder.plan.read_bytes()),
            clock=self.clock,
            provider=self.cloud,
            reach=self.reach,
            trainer=TINY / "trainer",
        )

    def _reach(self, instance: Instance) -> ScriptedFar:
        self.far.reached = instance.id
        return self.far

    def drive(self) -> ExitCode | str:
        """Drive the run as a supervisor does; return its exit code, the code of its error, or "killed" after a kill."""
        try:
            return Driver(self.context, Journal.open(self.folder.journal, self.clock)).drive()
        except GpurunError as error:
            if self.state.may_be_billing and error.exit_code is not ExitCode.MAY_BE_BILLING:
                raise AssertionError("9 outranks all others") from error
            return error.code
        except Killed:
            return "killed"

    @property
    def records(self) -> tuple[Record, ...]:
        return read_journal(self.folder.journal).records

    @property
    def state(self) -> RunState:
        return replay_journal(self.folder.name, self.records)

    def all_of(self, event: Event) -> list[dict[str, Any]]:
        return [record.data for record in self.records if record.event is event]

    @property
    def at_home(self) -> set[str]:
        return {path.name for path in self.folder.artifacts.rglob("*.safetensors")}
