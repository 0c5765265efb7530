"""A cloud that lies on demand, in virtual time. Its own meter says what was really rented, whatever gpurun believes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, GpurunError, SetupError
from gpurun.core.model import (
    Account,
    Address,
    GpuNeed,
    Instance,
    InstanceState,
    Lease,
    Mode,
    Offer,
    Order,
    Plan,
    Teardown,
)
from gpurun.core.money import Micros, cost_of, total, usd
from gpurun.core.paths import Home
from gpurun.core.progress import Event, Record, RunState
from gpurun.ledger.journal import Journal, read_journal
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver
from gpurun.lifecycle.state import replay
from gpurun.machine.answers import Facts, Manifest, ManifestFile, Shipped, Started, Status, Torch
from gpurun.machine.base import MachineLost
from gpurun.machine.far import Chunk, FarSide, Poll
from gpurun.machine.fetch import Wanted, fetch
from gpurun.machine.pack import Codec, Pack
from gpurun.providers.base import NoCapacity, Rejected, Traits, Unknown
from tests.lifecycle.drive import TINY
from tests.lifecycle.tiny_runs import make_run

CALL_S = 0.2
BOOT_S = 12.0
MOST_CALLS = 20_000
RATE = usd(2)
LEASE = Lease(boot_s=120, ship_s=60, train_s=300, collect_s=60, destroy_s=60, kill_allowance_s=60)
WEIGHTS = [(f"checkpoints/0000{step}.model.safetensors", bytes([step]) * 5000, step) for step in (10, 20, 30)]
TRAITS = Traits(120.0, 5.0, 3, 30.0, Teardown.DESTROYED, "https://console.example")


class Killed(BaseException):
    """The supervisor dies here, as by SIGKILL: nothing of it runs on."""


class Endless(BaseException):
    """Something is done for ever; no test should wait for that."""


@dataclass
class Box:
    """One machine that really exists, and for how long it has been paid for."""

    id: str
    order: Order
    rate: Micros
    born_s: float
    died_s: float | None = None
    gpu: str = "A100"


@dataclass
class ScriptedCloud:
    """Six verbs and the lies they tell; every call takes a little virtual time."""

    clock: VirtualClock
    name: str = "local"
    traits: Traits = TRAITS
    boxes: list[Box] = field(default_factory=list)
    creates: list[str] = field(default_factory=list)  # what each create does; "made" when the list is empty
    created: int = 0
    list_lag_s: float = 0.0
    deaf_destroys: int = 0
    rate: Micros = RATE
    told_rate: Callable[[str], Micros | None] = lambda verb: RATE
    gpu: str = "A100"
    reads: list[InstanceState] = field(default_factory=list)  # what the next reads say, true or not
    broken: dict[str, Exception] = field(default_factory=dict)  # verbs that answer with this, until it is taken out
    calls: int = 0
    killing: str = ""  # "before create", "after destroy", ...: the supervisor dies there, once

    def create(self, order: Order) -> Instance:
        self._call("create")
        self.created += 1
        how = self.creates.pop(0) if self.creates else "made"
        if how == "no capacity":
            raise NoCapacity("sold out")
        if how == "rejected":
            raise Rejected("no such type")
        if how == "dropped":
            raise Unknown("504")
        for _ in range(2 if how == "made twice" else 1):
            self.boxes.append(self._box(order))
        if how == "made, answer lost":
            raise Unknown("504")
        if how == "made, answer broken":
            raise KeyError("id")
        if how == "made, key revoked":
            raise SetupError("key.revoked", "401", hint="A new key.")
        self._die("after create")
        told = self._instance(self.boxes[-1 if how != "made twice" else -2], "create")
        return told.model_copy(update={"token": "gr-other-1"}) if how == "made, answer of another" else told

    def find(self, token: str | None) -> list[Instance]:
        self._call("find")
        now = self.clock.monotonic()
        shown = [box for box in self.boxes if box.died_s is None and now - box.born_s >= self.list_lag_s]
        return [self._instance(box, "find") for box in shown if token in (None, box.order.token)]

    def read(self, instance_id: str) -> Instance:
        self._call("read")
        box = next(box for box in self.boxes if box.id == instance_id)
        told = self._instance(box, "read")
        return told.model_copy(update={"state": self.reads.pop(0)}) if self.reads else told

    def destroy(self, instance_id: str) -> None:
        self._call("destroy")
        if self.deaf_destroys > 0:
            self.deaf_destroys -= 1
            return
        for box in self.boxes:
            if box.id == instance_id and box.died_s is None:
                box.died_s = self.clock.monotonic()
        self._die("after destroy")

    def verify(self) -> Account:
        return Account(provider=self.name, identity="scripted")

    def offers(self, need: GpuNeed) -> list[Offer]:
        return []

    @property
    def alive(self) -> list[Box]:
        return [box for box in self.boxes if box.died_s is None]

    def metered(self) -> Micros:
        """What the cloud will bill."""
        now = self.clock.monotonic()
        return total(
            *(cost_of(box.rate, (now if box.died_s is None else box.died_s) - box.born_s) for box in self.boxes)
        )

    def _box(self, order: Order) -> Box:
        return Box(f"i-{len(self.boxes) + 1}", order, self.rate, self.clock.monotonic(), gpu=self.gpu)

    def _instance(self, box: Box, verb: str) -> Instance:
        booted = self.clock.monotonic() - box.born_s >= BOOT_S
        state = InstanceState.RUNNING if booted else InstanceState.PENDING
        return Instance(
            id=box.id,
            provider=self.name,
            token=box.order.token,
            run=box.order.run,
            state=InstanceState.GONE if box.died_s is not None else state,
            address=Address(kind="folder", folder="nowhere"),
            gpu=box.gpu,
            gpu_count=1,
            rate_micros_per_hour=self.told_rate(verb),
            deadline_wall=box.order.deadline_wall,
        )

    def _call(self, verb: str) -> None:
        self._die(f"before {verb}")
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise Endless(verb)
        self.clock.sleep(CALL_S)
        if verb in self.broken:
            raise self.broken[verb]

    def _die(self, place: str) -> None:
        if self.killing == place:
            self.killing = ""
            raise Killed(place)


class ScriptedFar(FarSide):
    """An agent and a trainer that exist only as what they answer. `during` runs before every poll."""

    def __init__(self, cloud: ScriptedCloud) -> None:
        self.cloud, self.clock = cloud, cloud.clock
        self.train_s, self.started_s, self.stopped = 60.0, -1.0, ""
        self.broken: dict[str, Exception] = {}
        self.broken_times: dict[str, int] = {}
        self.during: Callable[[], None] = lambda: None
        self.get_s, self.get_most = CALL_S, 1 << 20
        self.polls = 0
        self.behind = 0

    def install_agent(self) -> None:
        self._call("install_agent")

    def hello(self, python: str | None = None) -> Facts:
        self._call("hello")
        torch = Torch(found=True, python="/py", version="2.13", cuda="13.0", devices=())
        return Facts(
            v=1, python="3.12", platform="Linux", cpus=8, memory_bytes=1 << 36, disk_free_bytes=1 << 40,
            codecs=("zstd", "gzip"), wall=self.clock.wall(), boot_id="far", shipped_sha256=None, torch=torch,
        )  # fmt: skip

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
        told = {"events.jsonl": story, "trainer.log": b"device: cuda\n"}
        chunks = {n: Chunk(at, told[n][at : at + most], len(told[n]) + self.behind) for n, (at, most) in wants.items()}
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

    def manifest(self, most_bytes: int) -> Manifest:
        self._call("manifest")
        files = [
            ManifestFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), kind="weights", step=step)
            for name, data, step in WEIGHTS
        ]
        return Manifest(latest=30, files=tuple(files))

    def fetch(
        self,
        name: str,
        size_bytes: int,
        sha256: str,
        into: Path,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> Path:
        content = next(data for known, data, _ in WEIGHTS if known == name)

        def get(offset: int, most: int) -> bytes:
            self._call(f"get {name}")
            self.clock.sleep(self.get_s)
            return content[offset : offset + min(most, self.get_most)]

        return fetch(Wanted(name, size_bytes, sha256, on_progress), into, get)

    @property
    def _has_ended(self) -> bool:
        return bool(self.stopped) or self.clock.monotonic() - self.started_s >= self.train_s

    def _events(self) -> list[dict[str, Any]]:
        start = {"kind": "start", "wall": 1.0, "elapsed_s": 0.0, "step": 0, "device": "cuda"}
        stop = {"kind": "stop", "reason": "signal" if self.stopped else "done", "message": "", "step": 30}
        return [start, stop] if self._has_ended else [start]

    def _call(self, verb: str) -> None:
        self.cloud._call(f"far.{verb}")
        left = self.broken_times.get(verb, MOST_CALLS)
        if verb in self.broken and left > 0:
            self.broken_times[verb] = left - 1
            raise self.broken[verb]
        if not self.cloud.alive:
            raise MachineLost("nobody answers")


class World:
    """A paid run of 10 dollars at most on the scripted cloud, and what becomes of it."""

    def __init__(self, home: Home) -> None:
        self.home, self.clock = home, VirtualClock()
        self.folder = make_run(home, lease=LEASE)
        self.cloud = ScriptedCloud(self.clock)
        self.far = ScriptedFar(self.cloud)
        plan = Plan.from_json(self.folder.plan.read_bytes())
        offer = plan.offer.model_copy(update={"gpu": "A100", "gpu_count": 1, "rate_micros_per_hour": RATE})
        worst = cost_of(RATE, LEASE.total_s + LEASE.kill_allowance_s, offer.billing_unit_s)
        told = {"offer": offer, "mode": Mode.PAID, "cap_micros": worst, "worst_micros": worst}
        self.plan = plan.model_copy(update=told)
        self.folder.plan.write_text(self.plan.to_json())

    def drive(self) -> ExitCode | str:
        """Drive the run as a supervisor does: its exit code, the code of the error it ends with, or "killed"."""
        context = Context(
            home=self.home,
            folder=self.folder,
            plan=Plan.from_json(self.folder.plan.read_bytes()),
            clock=self.clock,
            provider=self.cloud,
            reach=lambda instance: self.far,
            trainer=TINY / "trainer",
        )
        try:
            return Driver(context, Journal.open(self.folder.journal, self.clock)).drive()
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
        return replay(self.folder.name, self.records)

    def all_of(self, event: Event) -> list[dict[str, Any]]:
        return [record.data for record in self.records if record.event is event]

    @property
    def at_home(self) -> set[str]:
        return {path.name for path in self.folder.artifacts.rglob("*.safetensors")}
