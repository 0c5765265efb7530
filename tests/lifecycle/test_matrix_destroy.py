"""Tests of the fault matrix about a run's end: what proves a death, and which home may end which machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.orphans import Orphan
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState, Order
from gpurun.ledger.run_lock import RunLock
from gpurun.lifecycle import driver
from gpurun.lifecycle.artifacts.on_demand import Salvaged
from gpurun.lifecycle.instance.readings import InstanceReading, are_proof
from gpurun.lifecycle.reaper import sweep, sweep_leftovers
from gpurun.lifecycle.steps import collect_bucket
from gpurun.remote.messages import Manifest
from tests.lifecycle.faults import kept
from tests.lifecycle.matrix_destroy import beside
from tests.lifecycle.scripted_cloud import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path / "home"))


GONE, STOPPED = InstanceState.GONE, InstanceState.STOPPED


@pytest.mark.parametrize("state", [state for state in InstanceState if state is not GONE])
def test_only_gone_is_dead_even_where_the_list_is_empty(world: World, state: InstanceState) -> None:
    """Only the state GONE proves a death: a machine that is merely stopped still has a disk, which is billed."""
    read, find = world.cloud.read, world.cloud.find

    def changed_read(instance_id: str) -> Instance:
        changed = {"state": state} if world.all_of(Event.DESTROY_INTENDED) else {}
        return read(instance_id).model_copy(update=changed)

    def empty(token: str | None) -> list[Instance]:
        return [] if world.all_of(Event.DESTROY_INTENDED) else find(token)

    world.cloud.read, world.cloud.find = changed_read, empty  # type: ignore[method-assign]
    assert world.drive() == "destroy.not_gone"
    assert world.state.may_be_billing
    assert not world.all_of(Event.DEATH_PROVEN)
    assert not world.folder.receipt.exists()


def test_a_listed_machine_is_not_dead_whatever_a_read_says(world: World) -> None:
    """A read that reports the machine as gone does not prove its death while a list still shows it."""
    read = world.cloud.read

    def denied(instance_id: str) -> Instance:
        changed = {"state": GONE} if world.all_of(Event.DESTROY_INTENDED) else {}
        return read(instance_id).model_copy(update=changed)

    world.cloud.read, world.cloud.deaf_destroys = denied, 1000  # type: ignore[method-assign]
    assert world.drive() == "destroy.not_gone"
    assert len(world.cloud.alive) == 1
    assert world.state.may_be_billing
    world.cloud.deaf_destroys = 0
    assert world.drive() is ExitCode.DONE
    assert kept(world)


def test_the_proof_takes_three_kept_reads_over_thirty_seconds(world: World) -> None:
    assert world.drive() is ExitCode.DONE
    reads = world.all_of(Event.DEATH_READ)
    assert len(reads) == 3
    assert reads[-1]["at_s"] - reads[0]["at_s"] >= 30.0
    assert all(len(reading["answer_sha256"]) == 64 for reading in reads)
    assert kept(world)


def test_three_reads_in_one_breath_are_no_proof(world: World) -> None:
    def reads(*at_s: float) -> list[InstanceReading]:
        return [InstanceReading(read_s, GONE, listed=False, answer_sha256="0" * 64) for read_s in at_s]

    assert not are_proof(world.cloud, reads(0.0, 0.1, 0.2))
    assert not are_proof(world.cloud, reads(0.0, 60.0))
    assert are_proof(world.cloud, reads(0.0, 15.0, 30.0))


def test_a_cloud_that_lists_its_dead_is_believed_about_them(world: World) -> None:
    find = world.cloud.find

    def with_the_dead(token: str | None) -> list[Instance]:
        dead = [box for box in world.cloud.boxes if box.died_s is not None and token in (None, box.order.token)]
        return [*find(token), *(world.cloud.read(box.id) for box in dead)]

    world.cloud.find = with_the_dead  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert kept(world)
    assert swept(world, Home(world.home.root.parent / "elsewhere")) == []


# reap


def swept(world: World, home: Home, *, destroy_all: bool = False, older_than_s: float = 0.0) -> list[Orphan]:
    found = sweep([world.cloud], home, world.clock, destroy_all=destroy_all, older_than_s=older_than_s, look_only=False)
    return list(found)


def lost(world: World) -> Order:
    """Run until the supervisor is killed during training; return the `Order` from which the machine was created."""
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    return world.cloud.boxes[0].order


def test_a_lost_laptops_machine_is_reaped_only_past_its_deadline(world: World, tmp_path: Path) -> None:
    order, elsewhere = lost(world), Home(tmp_path / "elsewhere")
    assert [machine.fate for machine in swept(world, elsewhere)] == ["within lease"]
    assert len(world.cloud.alive) == 1
    world.clock.sleep(order.deadline_wall - world.clock.wall() + 1)
    assert [machine.fate for machine in swept(world, elsewhere)] == ["destroyed"]
    assert world.cloud.alive == []


def test_all_overdue_are_asked_to_end_before_any_end_is_proven(world: World) -> None:
    """One proof of death may take five minutes, in which the others would be billed.

    So gpurun must first request the end of every overdue machine.
    """
    order, others = lost(world), 3
    for number in range(others):
        world.cloud.create(order.model_copy(update={"token": f"gr-fox-41-0000000{number}"}))
    world.clock.sleep(order.deadline_wall - world.clock.wall() + 1)
    began_s, mortal = world.cloud.now, world.cloud.boxes[1:]
    destroy = world.cloud.destroy
    world.cloud.destroy = lambda name: destroy(name) if name != world.cloud.boxes[0].id else None  # type: ignore
    assert sorted(machine.fate for machine in swept(world, world.home)) == [*["destroyed"] * others, "not proven gone"]
    assert max((box.asked_s or began_s + 999) - began_s for box in mortal) < world.cloud.traits.death_spread_s


def test_a_young_machine_is_spared_by_older_than(world: World) -> None:
    lost(world)
    found = swept(world, world.home, destroy_all=True, older_than_s=3600.0)
    assert [machine.fate for machine in found] == ["within lease"]
    assert len(world.cloud.alive) == 1


def test_an_overdue_machine_driven_here_is_not_reaped(world: World) -> None:
    order = lost(world)
    world.clock.sleep(order.deadline_wall - world.clock.wall() + 1)
    with RunLock(world.folder.lock):
        assert [machine.fate for machine in swept(world, world.home, destroy_all=True)] == ["owned"]
    assert len(world.cloud.alive) == 1


def test_an_overdue_machine_of_another_home_takes_no_run_along(world: World) -> None:
    """Two homes may have runs of the same name: the other home's overdue machine is ended, this home's run is not."""
    ours = lost(world)
    theirs = world.cloud.create(ours.model_copy(update={"token": "gr-fox-41-ffffffff", "deadline_wall": 1.0}))
    fates = {machine.instance.token: machine.fate for machine in swept(world, world.home)}
    assert fates == {ours.token: "within lease", theirs.token: "destroyed"}
    assert [box.order.token for box in world.cloud.alive] == [ours.token]
    assert not world.folder.control.exists(), "nobody asked for the end of this home's own run"


# What lies beside a machine -------------------------------------------------------------------------------------------


def test_a_full_removal_leaves_a_living_machine_what_it_needs(world: World, tmp_path: Path) -> None:
    beside(world, billed=False)
    lost(world)
    strays = sweep_leftovers([world.cloud], Home(tmp_path / "elsewhere"), world.clock, remove_all=True, look_only=False)
    assert [stray.fate for stray in strays] == ["kept"]
    assert not [verb for _, verb, _ in world.cloud.history if verb == "remove"]


def test_billed_leftovers_go_before_anything_comes_from_a_bucket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download from the bucket may take an hour, so the volume, which is billed, must be removed before it."""
    beside(world, billed=True)
    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "remove", lambda leftover: None)
        assert world.drive() == "destroy.leftover"
    left: list[int] = []

    def bring(*_: object, **__: object) -> Salvaged:
        left.append(len(world.cloud.leftovers(None)))
        return Salvaged(Manifest(), (), {}, (), 0)

    monkeypatch.setattr(collect_bucket, "download_pushed_files", bring)
    list(driver.salvage_all(world.state.model_copy(update={"pushed": "runs/fox-41"}), world.context))
    assert left == [0]


@pytest.mark.parametrize("billed", [True, False])
def test_an_unremovable_thing_is_exit_9_only_where_it_is_billed(world: World, billed: bool) -> None:
    beside(world, billed=billed)
    world.cloud.remove = lambda leftover: None  # type: ignore[method-assign]
    outcome = world.drive()
    assert world.cloud.alive == []
    if billed:
        assert outcome == "destroy.leftover"
        assert not world.folder.receipt.exists()
    else:
        assert outcome is ExitCode.DONE
        assert [incident["code"] for incident in world.all_of(Event.INCIDENT)] == ["leftover"]
        assert kept(world)
