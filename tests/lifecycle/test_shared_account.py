"""Tests of several homes on one account: which home a machine belongs to, until when, and which home may end it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.commands import reap as reap_verb
from gpurun.cli.commands.ps import ps
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.journal_records import Event
from gpurun.core.machine_token import make_token, parse_token
from gpurun.core.orphans import Orphan
from gpurun.core.paths import Home
from gpurun.ledger.journal import Journal
from gpurun.ledger.run_lock import RunLock
from gpurun.lifecycle.reaper import sweep, sweep_leftovers
from tests.lifecycle.faults import receipt_of
from tests.lifecycle.scripted_cloud import World
from tests.refusals import lacking

Reap = Callable[..., tuple[int, Any]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world whose run trains, and whose supervisor was killed."""
    made = World(Home(tmp_path / "home"))
    made.cloud.killing = "before far.poll"
    assert made.drive() == "killed"
    return made


@pytest.fixture
def other(tmp_path: Path) -> Home:
    return Home(tmp_path / "other").prepare()


@pytest.fixture
def reap(world: World, monkeypatch: pytest.MonkeyPatch) -> Reap:
    """Return a function that runs `gpurun reap` in a home, and returns its exit code and data."""

    def run(home: Home, **flags: Any) -> tuple[int, Any]:
        try:
            result = reap_verb.reap(Session(home=home, clock=world.clock, json=True), **flags)
        except GpurunError as error:
            return int(error.exit_code), {}
        return int(result.exit_code), result.data

    monkeypatch.setattr("gpurun.providers.registry.ready_providers", lambda home: [])
    monkeypatch.setattr("gpurun.providers.registry.open_provider", lambda *_, **__: world.cloud)
    return run


def only(answer: Any) -> tuple[str, str]:
    (found,) = answer["found"]
    return found["fate"], found["owner"]


def looked_at(world: World, home: Home) -> Orphan:
    (found,) = sweep([world.cloud], home, world.clock, destroy_all=True, older_than_s=0.0, look_only=True)
    return found


def tag_as(world: World, **changed: object) -> None:
    """Make the provider's list show the machine with these tags changed."""
    find = world.cloud.find
    world.cloud.find = lambda token: [instance.model_copy(update=changed) for instance in find(token)]  # type: ignore


def test_destroy_ends_no_training_of_another_home_and_says_whose(world: World, other: Home, reap: Reap) -> None:
    code, answer = reap(other, destroy=True)
    assert (code, only(answer)) == (0, ("within lease", "elsewhere"))
    assert answer["found"][0]["home"] == world.home.id
    assert len(world.cloud.alive) == 1
    world.far.train_s = 30.0
    assert world.drive() is ExitCode.DONE


def test_destroy_ends_this_homes_machine_also_from_its_copy(world: World, reap: Reap) -> None:
    copy = Home(shutil.copytree(world.home.root, world.home.root.parent / "restored"))
    shutil.rmtree(copy.runs)
    code, answer = reap(copy, destroy=True)
    assert (code, only(answer)) == (0, ("destroyed", "here"))
    assert world.cloud.alive == []


@pytest.mark.parametrize(("confirm", "expected"), [(2, 3), (0, 3), (None, 2)])
def test_others_machines_end_only_when_their_number_is_confirmed(
    world: World, other: Home, reap: Reap, confirm: int | None, expected: int
) -> None:
    code, _ = reap(other, destroy=True, anyones=True, confirm=confirm)
    assert (code, len(world.cloud.alive)) == (expected, 1)
    code, answer = reap(other, destroy=True, anyones=True, confirm=1)
    assert (code, only(answer), world.cloud.alive) == (0, ("destroyed", "elsewhere"), [])


@pytest.mark.parametrize(("typed", "left"), [("1", 0), ("y", 1), ("", 1)])
def test_a_person_types_how_many_they_are(
    world: World, other: Home, reap: Reap, monkeypatch: pytest.MonkeyPatch, typed: str, left: int
) -> None:
    monkeypatch.setattr(Session, "ask", lambda self, question, *, flag: typed)
    assert reap(other, destroy=True, anyones=True)[0] == (3 if left else 0)
    assert len(world.cloud.alive) == left


@pytest.mark.parametrize("flags", [{"anyones": True}, {"destroy": True, "confirm": 1}, {"confirm": 0}])
def test_a_confirmation_of_nothing_is_refused(other: Home, reap: Reap, flags: dict[str, Any]) -> None:
    assert reap(other, **flags)[0] == 2


def test_a_machine_ended_from_elsewhere_is_recorded_as_lost(world: World, other: Home, reap: Reap) -> None:
    reap(other, destroy=True, anyones=True, confirm=1)
    world.drive()
    seen = world.all_of(Event.TRAIN_OBSERVED)[-1]
    assert seen["outcome"] == "lost"
    assert lacking(seen["message"], world.cloud.boxes[0].id, "another gpurun") == []
    assert receipt_of(world)["training"]["message"] == seen["message"]


@pytest.mark.parametrize("edited", [None, 9e9])
def test_an_edited_deadline_keeps_no_machine_alive(world: World, other: Home, reap: Reap, edited: float | None) -> None:
    tag_as(world, deadline_wall=edited)
    assert only(reap(other)[1]) == ("within lease", "elsewhere")
    world.clock.sleep(world.plan.lease.total_s + 60)
    code, answer = reap(other)
    assert (code, only(answer), world.cloud.alive) == (0, ("destroyed", "elsewhere"), [])


def test_an_older_tag_without_a_deadline_is_an_alarm_not_a_lease(world: World, other: Home, reap: Reap) -> None:
    """A machine whose tag has no deadline may be billed forever, so `reap` must exit with 9."""
    box = world.cloud.boxes[0]
    box.order = box.order.model_copy(update={"token": "gr-fox-41-0a1b2c3d"})
    tag_as(world, deadline_wall=None)
    world.clock.sleep(3 * 86400.0)
    for flags in ({}, {"look": True}, {"destroy": True}):
        code, answer = reap(other, **flags)
        assert (code, only(answer)) == (9, ("no deadline", "unknown")), flags
    assert len(world.cloud.alive) == 1
    code, answer = reap(other, destroy=True, anyones=True, confirm=1)
    assert (code, only(answer), world.cloud.alive) == (0, ("destroyed", "unknown"), [])


def test_an_older_machine_ends_by_this_homes_journal_not_its_tag(world: World) -> None:
    old = "gr-fox-41-0a1b2c3d"
    journal = world.folder.journal.read_bytes().replace(world.state.token.encode(), old.encode())
    world.folder.journal.write_bytes(journal)
    box = world.cloud.boxes[0]
    box.order = box.order.model_copy(update={"token": old})
    tag_as(world, deadline_wall=9e9)
    assert (looked_at(world, world.home).fate, looked_at(world, world.home).owner.run) == ("within lease", "fox-41")
    world.clock.sleep(world.plan.lease.total_s + 60)
    assert (looked_at(world, world.home).fate, looked_at(world, world.home).owner.run) == ("overdue", "fox-41")


def test_only_the_current_token_of_a_run_is_driven(world: World) -> None:
    """A late machine is in the journal under another token.

    The run's supervisor does not drive it, so it is not "owned".
    """
    box, token = world.cloud.boxes[0], make_token(world.home.id, world.cloud.boxes[0].order.deadline_wall, "fox-41")
    with RunLock(world.folder.lock):
        assert looked_at(world, world.home).fate == "owned"
        incident = {"code": "create.duplicate", "message": "A second machine.", "id": box.id, "token": token}
        Journal.open(world.folder.journal, world.clock).write(Event.INCIDENT, incident)
        box.order = box.order.model_copy(update={"token": token})
        found = looked_at(world, world.home)
    assert (found.fate, found.owner.whose, found.owner.run) == ("within lease", "here", "fox-41")


def test_an_overdue_second_machine_ends_without_its_run(world: World, reap: Reap) -> None:
    own, past = world.cloud.boxes[0], world.clock.wall() - 60
    token = make_token(world.home.id, past, "fox-41")
    extra = world.cloud.create(own.order.model_copy(update={"token": token, "deadline_wall": past}))
    incident = {"code": "create.duplicate", "message": "A second machine.", "id": extra.id, "token": token}
    Journal.open(world.folder.journal, world.clock).write(Event.INCIDENT, incident)
    assert reap(world.home)[0] == 0
    assert [box.id for box in world.cloud.alive] == [own.id]


def test_a_long_name_without_tags_is_found_in_the_journal(tmp_path: Path) -> None:
    token = make_token("3fa9c1", 1_800_009_000.0, "a-run-with-the-longest-name-that-fits")
    home = Home(tmp_path / "home").prepare()
    folder = home.run("a-run-with-the-longest-name-that-fits")
    folder.path.mkdir()
    folder.journal.write_text(json.dumps({"token": token}) + "\n")
    world = World(Home(tmp_path / "cloud"))
    order_of = {"run": parse_token(token).run, "token": token, "deadline_wall": 1_800_009_000.0}  # type: ignore[union-attr]
    world.cloud.killing = "before far.poll"
    world.drive()
    box = world.cloud.boxes[0]
    box.order = box.order.model_copy(update=order_of)
    assert looked_at(world, home).owner.run == folder.name


def test_side_resources_of_another_home_stay_within_their_lease(world: World, other: Home) -> None:
    world.cloud.profile = replace(world.cloud.profile, leaves=("ssh_key",))
    order = world.cloud.boxes[0].order
    world.cloud._leave_things(order)

    def fates(home: Home, **changes: bool) -> list[str]:
        options = {"remove_all": False, "look_only": False, **changes}
        return [leftover.fate for leftover in sweep_leftovers([world.cloud], home, world.clock, **options)]

    assert fates(other, remove_all=True, anyones=True) == ["kept"], "its machine lives"
    world.cloud.boxes[0].died_s = world.clock.monotonic()
    assert fates(other, remove_all=True) == ["kept"]
    assert fates(other, remove_all=True, anyones=True, look_only=True) == ["kept"]
    assert fates(world.home, remove_all=True) == ["removed"]
    world.cloud._leave_things(order.model_copy(update={"token": make_token("ffffff", order.deadline_wall, "owl-7")}))
    assert fates(world.home, remove_all=True) == ["kept"]
    assert fates(world.home, remove_all=True, anyones=True) == ["removed"]


def test_an_overdue_run_is_red_in_ps_despite_its_supervisor(world: World) -> None:
    session = Session(home=world.home, clock=world.clock)
    with RunLock(world.folder.lock):
        assert ps(session, all_runs=False).exit_code is ExitCode.DONE
        world.clock.sleep(world.plan.lease.total_s + 1)
        listed = ps(session, all_runs=False)
    assert listed.exit_code is ExitCode.MAY_BE_BILLING
    assert "OVERDUE" in listed.text
    assert lacking(listed.after, "fox-41", "deadline", "supervisor") == []
