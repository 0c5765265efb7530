"""Plays one scenario with the real lifecycle on simulated clouds, and keeps all that happened; it judges nothing."""

from __future__ import annotations

import contextlib
import io
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
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.lifecycle.artifacts.on_demand import bring_now
from gpurun.lifecycle.reaper import sweep, sweep_leftovers
from gpurun.lifecycle.supervisor import supervise
from gpurun.providers.base import Provider
from gpurun.readers.run_status import run_row
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import Started
from gpurun.view.list_tables import RunRow
from tests.emulators.fake import PROFILES, FakeCloud
from tests.lifecycle.drive import TINY
from tests.lifecycle.scripted_cloud import WEIGHTS, ScriptedFar
from tests.simulation.laptop import LaptopClock, TrueClock
from tests.simulation.nemesis import Endless, Killed, Nemesis
from tests.simulation.plans import LEASE, RUN, make_plan
from tests.simulation.scenario import Deed, Scenario

MOST_DRIVES = 16
PAUSE_S = 600.0
_AFTER_READY = ("unpack", "start", "poll", "manifest")  # That it has answered is on record by then.
_WISHES: dict[str, How] = {"stop": "save", "stop now": "now", "destroy": "destroy"}


@dataclass(frozen=True)
class Outcome:
    """How one attempt to drive the run ended, what `ps` shows at that moment, and what is true."""

    at_s: float
    words: str
    exit_code: int | None
    alive: int
    state: RunState
    row: RunRow
    metered: int


@dataclass
class Played:
    """All that happened: the checker's only source besides the run folder and the clouds' own meters."""

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
        """The records with the true times at which they were on disk."""
        events = {f"after {event}" for event in Event}
        return list(zip([at_s for at_s, place in self.points if place in events], self.records, strict=True))

    @property
    def closed(self) -> bool:
        return bool(self.outcomes) and self.outcomes[-1].state.exit_code is not None


class SimulatedFar(ScriptedFar):
    """The agent on one box: there while the box runs, behind a line that may be down; it stops the trainer in time."""

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


def play(scenario: Scenario, root: Path) -> Played:
    """Play a scenario to its end in an empty folder."""
    stage = Stage(scenario, root)
    with stage.set_up():
        stage.drive_to_the_end()
    return stage.played


class Stage:
    """The world of one scenario, and the people in it."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
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
        plan = make_plan(home, profiles, scenario.machines, is_sweep=scenario.job == "sweep")
        folder = create_run(home, Request(recipe="tiny"), plan)
        self.played = Played(scenario, home, folder, plan, clouds, self.nemesis.points)

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        """Put the simulated clouds, the laptop's clock and the points of death in place."""
        clouds, laptop, passing = self.played.clouds, self.laptop, self.nemesis.passing

        def told(name: str, *rest: object, **named: object) -> FakeCloud:
            return clouds[name]

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("gpurun.lifecycle.supervisor.open_provider", told))
            for module in ("ledger.journal", "ledger.write_receipt"):
                stack.enter_context(mock.patch(f"gpurun.{module}.crashpoint", passing))
            for module in ("ledger.journal", "lifecycle.context"):
                stack.enter_context(mock.patch(f"gpurun.{module}.boot_id", laptop.boot))
            # Who holds a file here holds it on this very thread, and never lets go of it while it is waited for.
            stack.enter_context(mock.patch("gpurun.remote.resumable_file.WAIT_S", 0.0))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            yield

    def drive_to_the_end(self) -> None:
        """Drive, and drive again after whatever ended it, as a user or a cron job would; or never again."""
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
        """Long after the deadline: whatever nobody saw to the end is swept from a machine that knows of no run."""
        self.true.sleep(LEASE.total_s + LEASE.kill_allowance_s + 3600.0)
        if not self.played.closed:
            with self.nemesis.resting():
                self.reap_elsewhere(times=4)

    def reap_elsewhere(self, *, times: int = 1, everything: bool = False) -> None:
        """`gpurun reap` on another machine, which has no record of any run; what it could not do is kept."""
        clouds: list[Provider] = list(self.played.clouds.values())
        for _ in range(times):
            self.played.after_reap.clear()
            home, clock = self.elsewhere, self.true
            try:
                reap = partial(sweep, clouds, home, clock, destroy_all=everything, older_than_s=0.0)
                others = [one.instance.id for one in reap(look_only=True)] if everything else []
                self.played.after_reap += [one.fate for one in reap(look_only=False, others=others)]
                left = partial(sweep_leftovers, clouds, home, clock, look_only=False)
                list(left(remove_all=everything, anyones=everything))
            except MayBeBilling as error:
                self.played.after_reap.append(error.code)
            except KeyError as broken:
                self.played.after_reap.append(f"broken answer: {broken}")
            self.true.sleep(60.0 if times > 1 else 0.0)

    def drive(self) -> Outcome:
        """One supervisor's life, from its start to its end or its death; the outcome is kept."""
        played, exit_code = self.played, None
        try:
            code = supervise(played.home, RUN, self.laptop, reach=self._reach, trainer=TINY / "trainer")
            words, exit_code = code.name, int(code)
        except GpurunError as error:
            words, exit_code = error.code, int(error.exit_code)
        except Killed:
            words = "killed"
        except Endless as endless:
            words, exit_code = f"endless: {endless}", int(ExitCode.BUG)
        alive = sum(len(cloud.alive) for cloud in played.clouds.values())
        row = run_row(look_at_run(played.home, RUN), self.laptop.wall())
        metered = total(*(cloud.metered() for cloud in played.clouds.values()))
        state = replay_journal(RUN, played.records)
        outcome = Outcome(self.true.monotonic(), words, exit_code, alive, state, row, metered)
        played.outcomes.append(outcome)
        return outcome

    def collect(self) -> None:
        """`gpurun collect` in another process, over a line that is whole again."""
        folder = self.played.folder
        for far in self._fars.values():
            far.flips.clear()
            with contextlib.suppress(GpurunError):
                budget = EgressBudget.of(folder, self.played.plan)
                bring_now(far, folder, "all", self.laptop, lambda *_: None, budget)

    def _reach(self, instance: Instance) -> SimulatedFar:
        if instance.id not in self._fars:
            cloud = self.played.clouds[instance.provider]
            self._fars[instance.id] = SimulatedFar(cloud, instance.id, self.nemesis, self.played.scenario.train_s)
        return self._fars[instance.id]

    def do(self, deed: Deed) -> None:
        """What people do."""
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
