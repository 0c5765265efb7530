"""Play one scenario with the real lifecycle on simulated clouds, and keep the history for the checker."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling
from gpurun.core.journal_records import Event, Record, RunState
from gpurun.core.money import total
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Instance
from gpurun.core.run_plan import Plan, Request
from gpurun.core.stop_request import How, ask_to_stop
from gpurun.ledger.journal import read_journal
from gpurun.ledger.run_state import replay_journal
from gpurun.ledger.runs import create_run, look_at_run
from gpurun.lifecycle.artifacts.downloader import BackgroundDownload
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.lifecycle.artifacts.on_demand import bring_now
from gpurun.lifecycle.reaper import sweep, sweep_leftovers
from gpurun.lifecycle.supervisor import supervise
from gpurun.providers.base import Provider
from gpurun.readers.run_status import run_row
from gpurun.remote.archive import Pack
from gpurun.remote.client import Poll
from gpurun.remote.download import WantedFile, fetch
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import Manifest, ManifestFile, Shipped, Started
from gpurun.view.list_tables import RunRow
from tests.emulators.fake import PROFILES, FakeCloud
from tests.lifecycle.drive import TINY
from tests.lifecycle.scripted_cloud import WEIGHTS, ScriptedFar
from tests.simulation.laptop import LaptopClock, TrueClock
from tests.simulation.nemesis import Endless, Killed, Nemesis
from tests.simulation.plans import EVERY, LEASE, RUN, STEPS, make_plan
from tests.simulation.scenario import Deed, Scenario
from tests.tensor_file import as_tensors

MOST_DRIVES = 16
PAUSE_S = 600.0
_AFTER_READY = ("unpack", "start", "poll", "manifest")  # These follow the record of the machine's answer.
_WISHES: dict[str, How] = {"stop": "save", "stop now": "now", "destroy": "destroy"}


@dataclass(frozen=True)
class Outcome:
    """The end of one supervisor: how it ended, what `ps` showed then, and the true state.

    `exit_code` is None if the supervisor was killed. `alive` counts the living machines, `metered` is the clouds' bill.
    """

    at_s: float
    words: str
    exit_code: int | None
    alive: int
    state: RunState
    row: RunRow
    metered: int


@dataclass
class Played:
    """The history of a scenario. Besides it the checker reads only the run's folder and the clouds' meters."""

    scenario: Scenario
    home: Home
    folder: RunFolder
    plan: Plan
    clouds: dict[str, FakeCloud]
    points: list[tuple[float, str]]
    outcomes: list[Outcome] = field(default_factory=list)
    after_reap: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def records(self) -> tuple[Record, ...]:
        return read_journal(self.folder.journal).records

    @property
    def timed(self) -> list[tuple[float, Record]]:
        """Return each record with the true time at which it was on disk."""
        events = {f"after {event}" for event in Event}
        return list(zip([at_s for at_s, place in self.points if place in events], self.records, strict=True))

    @property
    def closed(self) -> bool:
        return bool(self.outcomes) and self.outcomes[-1].state.exit_code is not None


class SimulatedFar(ScriptedFar):
    """The agent on one simulated machine.

    It can be reached while the machine runs and the line is up, and it ends the trainer at the soft stop.
    """

    def __init__(self, cloud: FakeCloud, box_id: str, nemesis: Nemesis, train_s: float) -> None:
        super().__init__(cloud)
        self._box_id, self._nemesis, self.train_s = box_id, nemesis, train_s
        if nemesis.scenario.damaged:
            self.flips[WEIGHTS[-1][0]] = 1 << 30
        self._soft_stop_wall = float("inf")

    def start(self, job: Mapping[str, Any]) -> Started:
        self._soft_stop_wall = min(self._soft_stop_wall, job["soft_stop_wall"])
        return super().start(job)

    def _box(self) -> str:
        return self._box_id

    @property
    def _has_ended(self) -> bool:
        return super()._has_ended or self.clock.wall() >= self._soft_stop_wall

    def _call(self, verb: str) -> None:
        super()._call(verb)
        box = next((box for box in self.cloud.alive if box.id == self._box_id), None)
        if box is None or self.cloud.now < box.up_s or self._nemesis.weather("line down"):
            raise MachineLost("no route to host")
        box.answered = box.answered or verb in _AFTER_READY
        self.cloud.passing(f"after far.{verb}")


class MovingFar(SimulatedFar):
    """An agent whose trainer continues from the uploaded checkpoint.

    Each new checkpoint is downloaded during training.
    """

    def __init__(self, cloud: FakeCloud, box_id: str, nemesis: Nemesis, train_s: float, *, folder: RunFolder) -> None:
        super().__init__(cloud, box_id, nemesis, train_s)
        self._folder, self._from, self._home = folder, 0, 0
        self._stop_s = float("inf")

    def unpack(self, pack: Pack, *of: Any, **more: Any) -> Shipped:
        for file in pack.survey.files:
            if file.name == "data/continue/MANIFEST.json":
                assert isinstance(file.source, bytes)
                self._from = json.loads(file.source)["latest"]
        return super().unpack(pack, *of, **more)

    def stop(self, *, now: bool = False, reason: str = "user") -> bool:
        answer = super().stop(now=now, reason=reason)
        self._stop_s = min(self._stop_s, self.clock.monotonic())
        return answer

    def _heed_lease(self) -> None:
        """Stop the trainer at the soft stop, where the time to save begins."""
        if self.clock.wall() >= self._soft_stop_wall and self._step < STEPS and not self.stopped:
            self.stopped, self._stop_s = "lease", self.clock.monotonic()

    def poll(self, wants: Mapping[str, tuple[int, int]]) -> Poll:
        self._heed_lease()
        reply = super().poll(wants)
        if self._saved[-1:] and self._saved[-1] != self._home:
            with contextlib.suppress(GpurunError, OSError):
                budget = EgressBudget(self._folder, None, STEPS)
                BackgroundDownload(None, self._folder, budget, self.cloud.clock).bring(self)
                self._home = self._saved[-1]
        return reply

    @property
    def _step(self) -> int:
        """Return the last step that is done; a stop freezes it."""
        until_s = min(self.clock.monotonic(), self._stop_s)
        trained = 0 if self.started_s < 0 else int((until_s - self.started_s) / self.train_s * STEPS)
        return min(STEPS, self._from + trained)

    @property
    def _has_ended(self) -> bool:
        return self.started_s >= 0 and (bool(self.stopped) or self._step >= STEPS)

    @property
    def _saved(self) -> list[int]:
        """Return the steps of the checkpoints that this machine has: its newest two."""
        steps = [step for step in range(EVERY, self._step + 1, EVERY) if step > self._from]
        return steps[-2:]

    def manifest(self, most_bytes: int) -> Manifest:
        self._call("manifest")
        files = tuple(ManifestFile(**file) for step in self._saved for file in checkpoint_of(step))
        return Manifest(latest=max(self._saved, default=None), best=None, files=files)

    def fetch(self, name: str, size_bytes: int, sha256: str, into: Path, **more: Any) -> Path:
        content = next(data for step in range(STEPS + 1) for known, data, _ in _files(step) if known == name)

        def get(offset: int, most: int) -> bytes:
            self._call(f"get {name}")
            self.clock.sleep(self.get_s)
            return content[offset : offset + most]

        wanted = WantedFile(name, size_bytes, sha256, more.get("on_progress"), more.get("aside", False))
        return fetch(wanted, into, lambda offset, most, take: take(get(offset, most)))

    def _events(self) -> list[dict[str, Any]]:
        on = {"device": "cuda", "cuda_name": self.card_name, "resumed_from": self._from or None}
        events: list[dict[str, Any]] = [{"kind": "start", "wall": 1.0, "elapsed_s": 0.0, "step": self._from, **on}]
        step_s = self.train_s / STEPS
        events += [
            {"kind": "step", "step": step, "loss": loss_at(step), "step_s": step_s, "elapsed_s": step * step_s}
            for step in range(self._from + 1, self._step + 1)
        ]
        stop = {"kind": "stop", "reason": "signal" if self.stopped else "done", "message": "", "step": self._step}
        return [*events, stop] if self._has_ended else events


def loss_at(step: int) -> float:
    """Return the loss of a step, which is the same on every machine."""
    return round(4.0 / (step + 1), 6)


def _files(step: int) -> list[tuple[str, bytes, str]]:
    name, filling = f"checkpoints/{step:06d}", bytes([step]) * 4926
    state = {"step": step, "loss": loss_at(step)}
    return [
        (f"{name}.model.safetensors", as_tensors(filling), "weights"),
        (f"{name}.optim.safetensors", as_tensors(filling[::-1]), "optimizer"),
        (f"{name}.state.json", json.dumps(state).encode(), "state"),
    ]


def checkpoint_of(step: int) -> list[dict[str, Any]]:
    """Return the files of a step's checkpoint, as a manifest lists them."""
    return [
        {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "kind": kind, "step": step}
        for name, data, kind in _files(step)
    ]


def play(scenario: Scenario, root: Path) -> Played:
    """Play a scenario to its end in an empty folder."""
    stage = Stage(scenario, root)
    with stage.set_up():
        stage.drive_to_the_end()
    return stage.played


class Stage:
    """The world of one scenario: its clouds and clocks, and the people who act on the run."""

    def __init__(self, scenario: Scenario, root: Path, run: str = RUN, mandate: str = "") -> None:
        self.true = TrueClock()
        self.laptop = LaptopClock(self.true)
        self.elsewhere = Home(root / "elsewhere")
        self.nemesis = Nemesis(scenario, self.laptop, self.do)
        self._off_s = 0.0
        self._fars: dict[str, SimulatedFar] = {}
        times = {kind: scenario.times_of(kind) for kind in ("silent", "ends refused", "denied")}
        made = partial(
            FakeCloud,
            nemesis=self.nemesis.fault,
            passing=self.nemesis.passing,
            outages=times["silent"],
            refusals=times["ends refused"],
            denials=times["denied"],
            laptop=self.laptop,
            list_s=scenario.list_s,
        )
        clouds = {PROFILES[name].name: made(PROFILES[name], self.true) for name in scenario.profiles}
        home = Home(root / "home")
        profiles = [PROFILES[name] for name in scenario.profiles]
        known = {"legs": scenario.legs, "train_s": scenario.train_s}
        plan = make_plan(home, profiles, scenario.machines, run, **known, kind=scenario.job)
        plan = plan.model_copy(update={"mandate": mandate})
        for cloud in clouds.values():
            cloud.stock = [candidate.offer for candidate in plan.candidates if candidate.offer.provider == cloud.name]
        folder = create_run(home, Request(recipe="tiny"), plan)
        self.played = Played(scenario, home, folder, plan, clouds, self.nemesis.points)

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Put the simulated clouds, boots and crash points into the lifecycle, within the block."""
        clouds, laptop, passing = self.played.clouds, self.laptop, self.nemesis.passing

        def fake_cloud(name: str, *rest: object, **named: object) -> FakeCloud:
            return clouds[name]

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("gpurun.lifecycle.supervisor.open_provider", fake_cloud))
            for module in ("ledger.journal", "ledger.write_receipt"):
                stack.enter_context(mock.patch(f"gpurun.{module}.crashpoint", passing))
            for module in ("ledger.journal", "lifecycle.context"):
                stack.enter_context(mock.patch(f"gpurun.{module}.boot_id", laptop.boot))
            # Here the thread that holds a file is also the one that waits for it: the wait would never succeed.
            stack.enter_context(mock.patch("gpurun.remote.resumable_file.WAIT_S", 0.0))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            yield

    def drive_to_the_end(self) -> None:
        """Drive the run, and again after each end, as a user or a cron job would, until it is closed.

        Only a scenario that ends "resumed" is driven again after a kill. Then the machines of an open run are swept
        from elsewhere. A scenario that ends "reaped elsewhere" is driven once more after that sweep.
        """
        scenario = self.played.scenario
        for _ in range(MOST_DRIVES):
            outcome = self.drive()
            if self.played.closed:
                break
            if outcome.words == "killed" and scenario.ending != "resumed":
                break
            self.true.sleep(self._off_s if outcome.words == "killed" else PAUSE_S)
        self.sweep_when_over()
        if not self.played.closed and scenario.ending == "reaped elsewhere":
            self.drive()
            self.sweep_when_over()
        self.played.ended_s = self.true.monotonic()

    def sweep_when_over(self) -> None:
        """Wait until long after the deadline; then sweep the machines of an open run from elsewhere."""
        self.true.sleep(LEASE.total_s + LEASE.kill_allowance_s + 3600.0)
        if not self.played.closed:
            with self.nemesis.resting():
                self.reap_elsewhere(times=4)

    def reap_elsewhere(self, *, times: int = 1, everything: bool = False) -> None:
        """Run `gpurun reap` on another machine, whose home has no record of any run.

        `after_reap` has, for the last call only, what became of each machine and the codes of failures.
        """
        clouds: list[Provider] = list(self.played.clouds.values())
        for _ in range(times):
            self.played.after_reap.clear()
            home, clock = self.elsewhere, self.true
            try:
                reap = partial(sweep, clouds, home, clock, destroy_all=everything, older_than_s=0.0)
                others = [swept.instance.id for swept in reap(look_only=True)] if everything else []
                self.played.after_reap += [swept.fate for swept in reap(look_only=False, others=others)]
                left = partial(sweep_leftovers, clouds, home, clock, look_only=False)
                list(left(remove_all=everything, anyones=everything))
            except MayBeBilling as error:
                self.played.after_reap.append(error.code)
            except KeyError as broken:
                self.played.after_reap.append(f"broken answer: {broken}")
            self.true.sleep(60.0 if times > 1 else 0.0)

    def drive(self) -> Outcome:
        """Run one supervisor from its start to its end or death; keep its outcome."""
        played, run, exit_code = self.played, self.played.plan.run, None
        try:
            code = supervise(played.home, run, self.laptop, reach=self._reach, trainer=TINY / "trainer")
            words, exit_code = code.name, int(code)
        except GpurunError as error:
            words, exit_code = error.code, int(error.exit_code)
        except Killed:
            words = "killed"
        except Endless as endless:
            words, exit_code = f"endless: {endless}", int(ExitCode.BUG)
        alive = sum(len(cloud.alive) for cloud in played.clouds.values())
        row = run_row(look_at_run(played.home, run), self.laptop.wall())
        metered = total(*(cloud.metered() for cloud in played.clouds.values()))
        state = replay_journal(run, played.records)
        outcome = Outcome(self.true.monotonic(), words, exit_code, alive, state, row, metered)
        played.outcomes.append(outcome)
        return outcome

    def collect(self) -> None:
        """Run `gpurun collect` as another process does; files of the present machines arrive undamaged from now on."""
        folder = self.played.folder
        for far in self._fars.values():
            far.flips.clear()
            with contextlib.suppress(GpurunError):
                budget = EgressBudget.from_plan(folder, self.played.plan)
                bring_now(far, folder, "all", self.laptop, lambda *_: None, budget)

    def _reach(self, instance: Instance) -> SimulatedFar:
        if instance.id not in self._fars:
            cloud, kind = self.played.clouds[instance.provider], SimulatedFar
            if self.played.scenario.legs:
                kind = partial(MovingFar, folder=self.played.folder)  # type: ignore[assignment]
            self._fars[instance.id] = kind(cloud, instance.id, self.nemesis, self.played.scenario.train_s)
        return self._fars[instance.id]

    def do(self, deed: Deed) -> None:
        """Do a deed of a person, the laptop or the cloud."""
        match deed.what:
            case "stop" | "stop now" | "destroy":
                ask_to_stop(self.played.folder, _WISHES[deed.what], by="user", reason="simulated")
            case "sleep":
                self.true.sleep(deed.amount)
            case "doze":
                self.laptop.doze(deed.amount)
            case "jump":
                self.laptop.jump_wall(deed.amount)
            case "kill":
                self._off_s = deed.amount
            case "kill and reboot":
                self._off_s = deed.amount
                self.laptop.reboot()
            case "collect":
                self.collect()
            case "guard killed":
                for cloud in self.played.clouds.values():
                    cloud.kill_guards()
            case "taken":
                for cloud in self.played.clouds.values():
                    cloud.take()
            case "reap elsewhere":
                self.reap_elsewhere()
            case "reap all":
                self.reap_elsewhere(everything=True)
