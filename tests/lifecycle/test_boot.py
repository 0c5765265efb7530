"""Tests of slow boots: gpurun uses a late machine, gives up one that never boots, and never exceeds the worst case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState
from gpurun.core.run_plan import Lease
from gpurun.jobs.trainer import KEPT_CHECKPOINTS, SAVE_START_S
from gpurun.lifecycle.steps.await_ready import LEAST_TRAINING
from gpurun.planning.budget import worst_case
from gpurun.planning.transfer import Load
from gpurun.providers.catalog import terms_of
from gpurun.remote.interface import MachineLost
from tests.changed_plan import changed_plan
from tests.lifecycle.faults import kept
from tests.lifecycle.scripted_cloud import World
from tests.lifecycle.tiny_runs import setting_up

PLANNED_S = 300
PATIENCE_S = terms_of("runpod").patience_s(1)
LEASE = Lease(boot_s=PLANNED_S, ship_s=60, train_s=36_000, collect_s=60, destroy_s=60, kill_allowance_s=60)


class Slow(World):
    """A run on RunPod's terms whose cap is its worst case, and whose machine needs `boot_s` seconds to boot."""

    def __init__(self, home: Home, boot_s: float, **shares_s: int) -> None:
        super().__init__(home)
        self.lease = LEASE.model_copy(update=shares_s)
        offer = self.plan.offer.model_copy(update={"provider": "runpod", "boot_s": self.lease.boot_s})
        home_bytes = KEPT_CHECKPOINTS * self.plan.job.checkpoint_bytes
        self.worst = worst_case(offer, self.lease, Load(ship_bytes=0, collect_bytes=home_bytes, disk_gb=50))
        changes = {"offer": offer, "lease": self.lease, "cap_micros": self.worst, "worst_micros": self.worst}
        self.plan = changed_plan(self.plan, changes)
        self.folder.plan.write_text(self.plan.to_json())
        self.cloud.profile = replace(self.cloud.profile, boot_s=boot_s)

    @property
    def lived_s(self) -> float:
        """Return the seconds from the machine's birth to its death."""
        (box,) = self.cloud.boxes
        assert box.died_s is not None
        return box.died_s - box.born_s


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.parametrize("boot_s", [1.5 * PLANNED_S, PATIENCE_S - 30.0])
def test_a_machine_that_is_late_is_used_and_trains(home: Home, boot_s: float) -> None:
    world = Slow(home, boot_s)
    assert world.drive() is ExitCode.DONE
    (ready,) = world.all_of(Event.READY_OBSERVED)
    assert ready["seconds"] > PLANNED_S
    assert len(world.at_home) == 3
    assert world.cloud.metered() <= world.worst
    assert kept(world)


def test_lateness_moves_neither_the_deadline_nor_the_worst_case(home: Home, tmp_path_factory: Any) -> None:
    late, quick = Slow(home, 1.5 * PLANNED_S), Slow(Home(tmp_path_factory.mktemp("quick")), 10.0)
    assert late.drive() is quick.drive() is ExitCode.DONE
    for world in (late, quick):
        (intent,) = [record for record in world.records if record.event is Event.CREATE_INTENDED]
        assert intent.data["deadline_wall"] - intent.wall == pytest.approx(LEASE.total_s, abs=1)
        assert intent.data["worst_micros"] == world.worst
        (order,) = [box.order for box in world.cloud.boxes]
        assert (order.deadline_wall, order.lease_s) == (intent.data["deadline_wall"], LEASE.total_s)
    stops = [world.all_of(Event.TRAIN_INTENDED)[0]["hard_stop_wall"] for world in (late, quick)]
    ends = [world.all_of(Event.CREATE_INTENDED)[0]["deadline_wall"] for world in (late, quick)]
    kept = [end - stop for end, stop in zip(ends, stops, strict=True)]
    assert kept == pytest.approx([LEASE.collect_s + LEASE.destroy_s] * 2)


def test_a_machine_that_never_comes_is_given_up_and_ended(home: Home) -> None:
    world = Slow(home, 1e9)
    assert world.drive() is ExitCode.NO_OFFER
    assert world.state.failure.code == "boot.timeout"
    assert PATIENCE_S <= world.lived_s <= PATIENCE_S + 30
    assert world.cloud.alive == []
    assert world.cloud.metered() < world.worst
    assert kept(world)


def test_a_machine_without_a_public_port_is_given_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod in RunPod's community cloud may have no public port. gpurun could never reach it and must end it."""
    world = Slow(home, 10.0)
    read = world.cloud.read
    monkeypatch.setattr(world.cloud, "read", lambda name: read(name).model_copy(update={"address": None}))
    assert world.drive() is ExitCode.NO_OFFER
    assert world.state.failure.code == "boot.timeout"
    assert "public address" in world.state.failure.message
    assert world.cloud.alive == []
    assert kept(world)


def test_the_wait_always_leaves_time_to_train(home: Home) -> None:
    world = Slow(home, 1e9, train_s=600)
    assert world.drive() is ExitCode.NO_OFFER
    lease = world.lease
    rest_s = lease.ship_s + LEAST_TRAINING * lease.train_s + SAVE_START_S + lease.collect_s + lease.destroy_s
    assert PLANNED_S < world.lived_s < PATIENCE_S
    assert world.lived_s == pytest.approx(lease.total_s - rest_s, abs=10)
    assert world.cloud.metered() < world.worst
    assert kept(world)


def test_the_last_machine_waited_for_still_trains_in_time(home: Home) -> None:
    """If the boot takes as long as gpurun waits, the training stops early, and its files are still downloaded."""
    world = Slow(home, 1.0, train_s=600)
    world.cloud.profile = replace(world.cloud.profile, boot_s=world.lease.total_s - 360.0)
    world.far.train_s = 1e6
    world.far.during = lambda: obey(world)
    assert world.drive() is ExitCode.BUDGET_STOP
    (job,) = world.all_of(Event.TRAIN_INTENDED)
    (started,) = [record for record in world.records if record.event is Event.TRAIN_STARTED]
    assert job["soft_stop_wall"] - started.wall >= LEAST_TRAINING * world.lease.train_s
    assert len(world.at_home) == 3
    assert world.cloud.metered() <= world.worst
    assert kept(world)


def obey(world: World) -> None:
    """Stop the trainer at the soft stop, as the agent on the machine does."""
    (job,) = world.all_of(Event.TRAIN_INTENDED)
    if world.clock.wall() >= job["soft_stop_wall"]:
        world.far.stopped = "lease"


def test_a_machine_that_stopped_in_its_boot_is_not_waited_for(home: Home) -> None:
    """A spot pod taken back while it boots never starts again: gpurun must not wait for the whole planned boot."""
    world = Slow(home, 1e9)
    read = world.cloud.read

    def stopped(instance_id: str) -> Instance:
        instance = read(instance_id)
        is_ending = bool(world.all_of(Event.DESTROY_INTENDED))
        return instance if is_ending else instance.model_copy(update={"state": InstanceState.STOPPED, "said": "EXITED"})

    world.cloud.read = stopped  # type: ignore[method-assign]
    assert world.drive() is ExitCode.NO_OFFER
    assert "EXITED" in world.state.failure.message
    assert world.cloud.traits.settle_s <= world.lived_s <= world.cloud.traits.settle_s + 30 < PLANNED_S
    assert kept(world)


def test_a_provider_that_is_silent_during_boot_is_waited_for(home: Home) -> None:
    world = Slow(home, 10.0)
    world.cloud.outages = [(5.0, 5.0 + 1.5 * PLANNED_S)]
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_an_sshd_that_comes_late_is_waited_for_too(home: Home) -> None:
    world = Slow(home, 10.0)
    world.far.broken = {"install_agent": MachineLost("refused")}
    world.far.broken_times = {"install_agent": int(1.5 * PLANNED_S / world.cloud.traits.poll_s)}
    assert world.drive() is ExitCode.DONE
    assert kept(world)


@pytest.mark.parametrize("boot_s", [10.0, 1.5 * PLANNED_S])
@pytest.mark.parametrize("setup_s", [240, 0])
def test_the_users_script_has_its_whole_limit_after_a_slow_boot(home: Home, boot_s: float, setup_s: int) -> None:
    """A slow boot must not shorten the limit of the --setup script.

    A plan of an older gpurun has no such limit (0 s): then the planned boot time is the limit.
    """
    world = Slow(home, boot_s, setup_s=setup_s)
    setting_up(world.folder, "pip install something")
    assert world.drive() is ExitCode.DONE
    assert world.far.setup_limits_s == [setup_s or PLANNED_S]


def test_a_machine_too_late_to_set_up_and_train_is_given_up(home: Home) -> None:
    world = Slow(home, 1e9, train_s=600, setup_s=900)
    setting_up(world.folder, "pip install something")
    assert world.drive() is ExitCode.NO_OFFER
    lease = world.lease
    rest_s = 900 + lease.ship_s + LEAST_TRAINING * lease.train_s + SAVE_START_S + lease.collect_s + lease.destroy_s
    assert world.lived_s == pytest.approx(lease.total_s - rest_s, abs=10)
