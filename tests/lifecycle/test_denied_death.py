"""Tests of a provider that reports a living machine as gone: while the machine answers, its death is not proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import Instance, InstanceState
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from tests.emulators.fake import Fault
from tests.lifecycle.scripted_cloud import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def deny(world: World, seconds: float) -> None:
    """Make the cloud report the machine as gone, and keep it alive, for `seconds` after the first destroy."""
    cloud, begun = world.cloud, list[float]()
    find, read, destroy = cloud.find, cloud.read, cloud.destroy

    def is_denied() -> bool:
        return bool(begun) and cloud.now - begun[0] < seconds

    def denying_find(token: str | None) -> list[Instance]:
        found = find(token)
        return [] if is_denied() else found

    def denying_read(instance_id: str) -> Instance:
        instance = read(instance_id)
        return instance.model_copy(update={"state": InstanceState.GONE}) if is_denied() else instance

    def denying_destroy(instance_id: str) -> None:
        begun.append(cloud.now)
        if is_denied():
            cloud.script["destroy"] = [*cloud.script.get("destroy", []), Fault.DEAF]
        destroy(instance_id)

    cloud.find, cloud.read, cloud.destroy = denying_find, denying_read, denying_destroy  # type: ignore[method-assign]


def codes(world: World) -> list[str]:
    return [incident["code"] for incident in world.all_of(Event.INCIDENT)]


def test_a_machine_that_answers_is_not_gone_and_ends_once_known(world: World) -> None:
    deny(world, 38.0)
    assert str(world.drive()) == "0"
    (box,) = world.cloud.boxes
    proven = next(record for record in world.records if record.event is Event.DEATH_PROVEN)
    assert box.died_s is not None
    assert box.died_s <= proven.mono
    assert list(dict.fromkeys(codes(world))) == ["death.denied", "machine.back"], "each time that it shows itself again"
    paid = read_receipt(world.home, world.folder).predicate["cost"]["upper_bound_micros"]
    assert paid >= world.cloud.bill(box)
    assert [row.problems for row in audit(world.home).rows] == [()]


def test_a_machine_denied_for_good_stays_red_with_both_facts(world: World) -> None:
    deny(world, 1e6)
    assert world.drive() == "destroy.not_gone"
    intent = world.records[[r.event for r in world.records].index(Event.DESTROY_INTENDED)]
    took_s = world.records[-1].mono - intent.mono
    assert took_s <= 2 * world.cloud.traits.settle_s + 60.0
    assert world.state.may_be_billing
    assert "SSH" in world.all_of(Event.INCIDENT)[-1]["message"]
    assert codes(world).count("death.denied") == 1
    assert len(world.all_of(Event.DESTROY_ASKED)) > 2


def test_a_machine_that_is_silent_is_proven_gone_as_before(world: World) -> None:
    assert str(world.drive()) == "0"
    proof = world.all_of(Event.DEATH_PROVEN)[0]
    assert proof["spread_s"] <= world.cloud.traits.death_spread_s + 5.0
    assert codes(world) == []


def test_one_that_never_answered_is_not_knocked_at(world: World) -> None:
    world.far.broken["install_agent"] = RuntimeError("no agent")
    knocks: list[float] = []

    def answers(limit_s: float) -> bool:
        knocks.append(limit_s)
        return True

    world.far.answers = answers  # type: ignore[method-assign]
    world.drive()
    assert not world.cloud.alive
    assert knocks == []
