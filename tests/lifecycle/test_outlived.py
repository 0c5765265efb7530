"""Tests of a machine that lives after its recorded death: `reap` finds it, the run is red, its end is proven again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.commands import audit as audit_verb
from gpurun.cli.commands import reap as reap_verb
from gpurun.cli.commands.ps import ps
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Phase
from gpurun.core.machine_token import make_token
from gpurun.core.money import usd
from gpurun.core.orphans import LONGEST_LEASE_S
from gpurun.core.paths import Home
from gpurun.core.records import Charge, Instance
from gpurun.ledger.audit import audit
from gpurun.ledger.run_lock import RunLock
from gpurun.lifecycle.reaper import sweep
from tests.lifecycle.late import codes
from tests.lifecycle.never_gives_up import late_machine
from tests.lifecycle.scripted_cloud import World
from tests.refusals import lacking


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(Home(tmp_path / "home"))
    monkeypatch.setattr("gpurun.providers.registry.ready_providers", lambda home: [])
    monkeypatch.setattr("gpurun.providers.registry.open_provider", lambda *_, **__: made.cloud)
    monkeypatch.setattr("gpurun.lifecycle.supervisor.open_provider", lambda *_, **__: made.cloud)
    return made


@pytest.fixture
def risen(world: World) -> World:
    """Return a world whose run is closed with a proof of death. Five minutes later its machine is listed again."""
    assert world.drive() is ExitCode.DONE
    (box,) = world.cloud.boxes
    box.asked_s = box.died_s = None
    world.clock.sleep(300.0)
    return world


def reap(world: World, **flags: Any) -> tuple[int, list[str]]:
    result = reap_verb.reap(Session(home=world.home, clock=world.clock, json=True), **flags)
    return int(result.exit_code), [machine["fate"] for machine in result.data["found"]]  # type: ignore[index,call-overload]


def listed(world: World) -> ExitCode:
    return ps(Session(home=world.home, clock=world.clock), all_runs=False).exit_code


def test_a_look_says_that_it_may_be_billing(risen: World) -> None:
    assert reap(risen, look=True) == (9, ["closed here"])
    assert len(risen.cloud.alive) == 1


def test_reap_puts_it_on_record_and_sees_it_gone(risen: World) -> None:
    assert reap(risen) == (0, ["destroyed"])
    assert risen.cloud.alive == []
    assert codes(risen) == ["create.late", "create.late_gone"]
    assert (risen.state.phase, risen.state.may_be_billing) == (Phase.CLOSED, False)
    (row,) = audit(risen.home).rows
    (problem,) = row.problems
    assert "i-local-1" in problem


def test_while_it_will_not_go_every_list_says_so(risen: World) -> None:
    risen.cloud.destroy = lambda instance_id: None  # type: ignore[method-assign]
    assert reap(risen) == (9, ["not proven gone"])
    assert listed(risen) is ExitCode.MAY_BE_BILLING
    (row,) = audit(risen.home).rows
    assert row.may_be_billing
    del risen.cloud.destroy
    assert reap(risen) == (0, ["destroyed"])
    assert [code for code in codes(risen) if code.startswith("create.late")] == ["create.late", "create.late_gone"]
    assert listed(risen) is ExitCode.DONE


def test_a_list_that_contradicts_a_read_ends_and_records_nothing(risen: World) -> None:
    read = risen.cloud.read
    risen.cloud.read = lambda name: read(name).model_copy(update={"state": "GONE"})  # type: ignore[method-assign]
    assert reap(risen) == (9, ["closed here"])
    assert codes(risen) == []
    assert len(risen.cloud.alive) == 1


def test_an_id_that_another_order_has_by_now_is_left_alone(risen: World) -> None:
    read, other = risen.cloud.read, make_token("abcdef", risen.clock.wall() + 900.0, "owl-7")
    risen.cloud.read = lambda name: read(name).model_copy(update={"token": other})  # type: ignore[method-assign]
    assert reap(risen) == (9, ["closed here"])
    assert codes(risen) == []
    assert len(risen.cloud.alive) == 1


def test_another_id_with_the_same_token_ends_only_on_purpose(risen: World) -> None:
    """A machine with this run's token and another id may belong to a copy of the home.

    Only `reap --destroy` ends it.
    """
    risen.cloud.boxes[0].id = "i-another"
    assert reap(risen) == (9, ["closed here"])
    assert len(risen.cloud.alive) == 1
    assert reap(risen, destroy=True) == (0, ["destroyed"])
    assert codes(risen) == ["create.late", "create.late_gone"]


def test_a_late_machine_is_left_to_its_runs_own_supervisor(world: World) -> None:
    late_machine(world)
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    world.clock.sleep(120.0)
    assert len(world.cloud.alive) == 2
    assert sorted(reap(world, look=True)[1]) == ["closed here", "within lease"]
    with RunLock(world.folder.lock):
        assert sorted(reap(world)[1]) == ["owned", "within lease"]
    assert len(world.cloud.alive) == 2


def renamed(world: World, name: str) -> None:
    """Rename the machine, as a user can in the provider's console. If the name is empty, no list shows the machine."""
    find, read = world.cloud.find, world.cloud.read

    def with_name(instance: Instance) -> Instance:
        return instance.model_copy(update={"token": name, "run": ""})

    world.cloud.find = lambda token: [with_name(box) for box in find(None) if name and token in (None, name)]  # type: ignore[method-assign]
    world.cloud.read = lambda instance_id: with_name(read(instance_id))  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["", "gpurun-abcdef-4000000000-c4deb1-owl-7"])
def test_a_machine_a_journal_waits_for_is_found_by_id_not_name(world: World, name: str) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    renamed(world, name)
    assert reap(world) == (0, ["within lease"])
    world.clock.sleep(world.plan.lease.total_s + 60.0)
    assert reap(world) == (0, ["destroyed"])
    assert world.cloud.alive == []
    assert world.state.phase is Phase.CLOSED
    assert [row.problems for row in audit(world.home).rows] == [()]


@pytest.mark.parametrize(("later_s", "fate"), [(-7200.0, "within lease"), (7200.0, "no deadline")])
def test_a_name_beyond_the_longest_lease_is_not_believed(
    world: World, tmp_path: Path, later_s: float, fate: str
) -> None:
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    (box,) = world.cloud.boxes
    token = make_token("abcdef", world.clock.wall() + LONGEST_LEASE_S + later_s, "owl-7")
    box.order = box.order.model_copy(update={"token": token, "deadline_wall": None}, deep=False)
    elsewhere = Home(tmp_path / "elsewhere").prepare()
    flags = {"destroy_all": False, "older_than_s": 0.0, "look_only": False}
    (found,) = sweep([world.cloud], elsewhere, world.clock, **flags)  # type: ignore[arg-type]
    assert found.fate == fate


def test_the_intent_of_a_run_of_days_is_believed_in_its_own_home(world: World) -> None:
    days = world.plan.lease.model_copy(update={"train_s": 3 * 86_400})
    assert days.total_s > LONGEST_LEASE_S
    world.folder.plan.write_text(world.plan.model_copy(update={"lease": days, "cap_micros": None}).to_json())
    world.cloud.killing = "before far.poll"
    assert world.drive() == "killed"
    assert world.all_of(Event.CREATE_INTENDED)
    assert reap(world) == (0, ["within lease"])


def test_a_bill_that_outgrows_the_proof_names_the_living_machine(risen: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def charges(instance_id: str, from_wall: float, to_wall: float) -> Charge:
        return Charge(provider="local", instance_id=instance_id, micros=usd("5.61"), settled=False)

    risen.cloud.charges = charges  # type: ignore[attr-defined]
    session = Session(home=risen.home, clock=risen.clock)
    result = audit_verb.audit(session, against_bill=True)
    assert result.exit_code is ExitCode.MAY_BE_BILLING
    assert lacking(result.text, "i-local-1", "gpurun reap") == []
    assert ["gpurun reap" in error.hint for error in result.errors] == [True]
    assert reap(risen) == (0, ["destroyed"])
    assert audit_verb.audit(session, against_bill=True).exit_code is ExitCode.VERIFICATION_FAILED
