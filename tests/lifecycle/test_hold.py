"""Tests of keeping a machine whose end would destroy files that are not at home: within its lease, and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.lifecycle.artifacts.on_demand import bring_now
from gpurun.lifecycle.notices import Noticed
from gpurun.remote.interface import FarRefusal, MachineLost
from tests.lifecycle.scripted_cloud import FINISHED, WEIGHTS, World
from tests.refusals import lacking

DAMAGED = WEIGHTS[2][0]
ELSEWHERE = {"files": 2, "bytes": 7_000_000, "first": [{"name": "~/checkpoints/last.pt", "bytes": 7_000_000}]}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def world(home: Home) -> World:
    """Return a world in which one file of the latest checkpoint always arrives with a wrong digest."""
    world = World(home)
    world.far.flips[DAMAGED] = 1 << 30
    return world


def held_s(world: World) -> float:
    """Return the seconds for which the machine was held, from the journal."""
    (begun,), (ended,) = (
        [record for record in world.records if record.event is event]
        for event in (Event.HOLD_INTENDED, Event.HOLD_OBSERVED)
    )
    return ended.wall - begun.wall


def receipt(world: World) -> Any:
    return read_receipt(world.home, world.folder).predicate


def while_held(world: World, do: Any) -> None:
    """Make the first poll of the held machine call `do`."""

    def during() -> None:
        if world.state.phase is Phase.HELD:
            world.far.during = lambda: None
            do()

    world.far.during = during


def proven_and_audited(world: World) -> None:
    assert world.cloud.alive == []
    assert world.all_of(Event.DEATH_PROVEN)
    cost = receipt(world)["cost"]
    assert world.cloud.metered() <= cost["upper_bound_micros"] <= cost["cap_micros"]
    assert [row.problems for row in audit(world.home).rows] == [()]


def collect(world: World) -> None:
    """Let the downloads succeed again, and then fetch the files as a separate `gpurun collect` would."""
    world.far.flips.clear()
    budget = EgressBudget.from_plan(world.folder, world.plan)
    bring_now(world.far, world.folder, "all", world.clock, lambda *_: None, budget)


def test_a_failed_digest_is_exit_11_and_holds_within_the_lease(world: World) -> None:
    assert world.drive() == ExitCode.COLLECT_FAILED
    (intent,) = world.all_of(Event.HOLD_INTENDED)
    assert (intent["files"], intent["bytes"], intent["first"]) == (1, 5000, [DAMAGED])
    assert "gpurun collect fox-41" in intent["message"]
    assert "gpurun destroy fox-41" in intent["message"]
    assert world.all_of(Event.HOLD_OBSERVED)[-1]["how"] == "over"
    assert held_s(world) > 60
    created, deadline = world.records[1], world.all_of(Event.CREATE_INTENDED)[0]["deadline_wall"]
    request = next(record for record in world.records if record.event is Event.DESTROY_ASKED)
    assert request.wall <= deadline - world.plan.lease.destroy_s
    assert request.wall - created.wall <= 900 + 600
    predicate = receipt(world)
    assert predicate["checkpoint"]["missing"] == [DAMAGED]
    assert DAMAGED in predicate["training"]["failed_step"]["message"]
    assert predicate["runtime"]["phases_s"]["hold"] == pytest.approx(held_s(world), abs=1)
    proven_and_audited(world)


def test_a_later_collect_ends_the_hold_and_counts_as_the_first(world: World) -> None:
    while_held(world, lambda: collect(world))
    assert world.drive() == ExitCode.DONE
    assert world.all_of(Event.HOLD_OBSERVED)[-1]["how"] == "home"
    assert held_s(world) < 60
    predicate = receipt(world)
    assert (predicate["checkpoint"]["missing"], predicate["training"]["failed_step"]) == ([], None)
    assert {file["name"] for file in predicate["checkpoint"]["files"]} >= {name for name, _, _ in WEIGHTS}
    proven_and_audited(world)


def test_what_could_not_even_be_listed_may_come_while_it_is_held(home: Home) -> None:
    world = World(home)
    world.far.broken["manifest"] = FarRefusal("nonsense", "its list makes no sense")

    def mended() -> None:
        world.far.broken.clear()
        collect(world)

    while_held(world, mended)
    assert world.drive() == ExitCode.DONE
    assert {file["name"] for file in receipt(world)["checkpoint"]["files"]} >= {name for name, _, _ in WEIGHTS}
    proven_and_audited(world)


def test_a_killed_supervisors_hold_lasts_to_the_same_moment(world: World) -> None:
    while_held(world, lambda: setattr(world.cloud, "killing", "before far.poll"))
    assert world.drive() == "killed"
    assert world.state.phase is Phase.HELD
    until_wall = world.state.hold_until_wall
    world.clock.sleep(30)
    assert world.drive() == ExitCode.COLLECT_FAILED
    assert len(world.all_of(Event.HOLD_INTENDED)) == 1
    ended = next(record for record in world.records if record.event is Event.HOLD_OBSERVED)
    assert until_wall is not None
    assert ended.wall == pytest.approx(until_wall, abs=3)
    proven_and_audited(world)


def test_a_supervisor_back_after_the_hold_ends_the_machine(world: World) -> None:
    while_held(world, lambda: setattr(world.cloud, "killing", "before far.poll"))
    assert world.drive() == "killed"
    world.clock.sleep(3600)
    began = world.clock.monotonic()
    assert world.drive() == ExitCode.COLLECT_FAILED
    assert world.clock.monotonic() - began < 120
    assert world.cloud.alive == []


def test_destroy_ends_the_hold_at_once(world: World) -> None:
    while_held(world, lambda: ask_to_stop(world.folder, "destroy", by="user", reason="it is not worth it"))
    assert world.drive() == ExitCode.COLLECT_FAILED
    assert world.all_of(Event.HOLD_OBSERVED) == []
    stopped, request = (
        next(record for record in world.records if record.event is event)
        for event in (Event.STOP_REQUESTED, Event.DESTROY_ASKED)
    )
    assert request.wall - stopped.wall < 5
    proven_and_audited(world)


def test_a_machine_that_is_gone_is_not_held(world: World) -> None:
    def vanishes() -> None:
        for box in world.cloud.alive:
            world.cloud.destroy(box.id)
        raise MachineLost("nobody answers")

    while_held(world, vanishes)
    assert world.drive() == ExitCode.COLLECT_FAILED
    assert world.all_of(Event.HOLD_OBSERVED)[-1]["how"] == "gone"
    assert held_s(world) < 60


@pytest.mark.parametrize("hold_s", [0, 120])
def test_the_hold_is_as_long_as_its_user_says(world: World, hold_s: int) -> None:
    choices = world.plan.choices.model_copy(update={"hold_s": hold_s})
    plan = json.loads(world.folder.plan.read_text()) | {"choices": choices.model_dump(mode="json")}
    world.folder.plan.write_text(json.dumps(plan))
    assert world.drive() == ExitCode.COLLECT_FAILED
    if hold_s:
        assert held_s(world) == pytest.approx(hold_s, abs=3)
    else:
        assert world.all_of(Event.HOLD_INTENDED) == []


def outputs(world: World, **more: Any) -> None:
    """Make the agent report, before its last event, the files that the command has written."""
    before = world.far._events

    def events() -> list[dict[str, Any]]:
        *earlier, last = before()
        left = {"kind": "outputs", "step": 0, "published": {"files": 3, "bytes": 15_000}, "matched": {"**": 3}, **more}
        return [*earlier, left, last] if last["kind"] == "stop" else [*earlier, last]

    world.far._events = events  # type: ignore[method-assign]


def test_results_elsewhere_are_exit_6_named_and_held(home: Home) -> None:
    world = World(home)
    outputs(world, elsewhere=ELSEWHERE)
    assert world.drive() == ExitCode.TRAINING_FAILED
    (ended,) = world.all_of(Event.TRAIN_OBSERVED)
    assert (ended["outcome"], ended["reason"], ended["exit_code"]) == ("failed", "outputs_elsewhere", 0)
    assert "~/checkpoints/last.pt (7 MB) and more" in ended["message"]
    assert "--outputs '~/checkpoints/**'" in ended["message"]
    assert held_s(world) > 60
    assert receipt(world)["training"]["message"] == ended["message"]
    proven_and_audited(world)


def test_finished_but_unlisted_files_are_exit_11_and_held(home: Home) -> None:
    world = World(home)
    outputs(world, unpublished={"files": 31, "bytes": 9_000, "first": [{"name": "outputs/a.pt", "bytes": 300}]})
    assert world.drive() == ExitCode.COLLECT_FAILED
    failure = world.state.failure
    assert failure is not None
    assert lacking(failure.message, "31 ", "9,000 bytes") == []
    assert receipt(world)["checkpoint"]["missing"] == ["outputs/a.pt"]
    assert held_s(world) > 60
    proven_and_audited(world)


@pytest.mark.parametrize(
    ("left", "reason", "words"),
    [
        ({"still_working": ["python train.py"]}, "still_working", "drop the &"),
        ({"unmatched": ["--outputs out/**"]}, "no_outputs", "--outputs out/**"),
    ],
)
def test_a_command_that_did_nothing_is_exit_6_and_is_not_held(
    home: Home, left: dict[str, Any], reason: str, words: str
) -> None:
    world = World(home)
    outputs(world, **left)
    assert world.drive() == ExitCode.TRAINING_FAILED
    (ended,) = world.all_of(Event.TRAIN_OBSERVED)
    assert (ended["reason"], words in ended["message"]) == (reason, True)
    assert world.all_of(Event.HOLD_INTENDED) == []
    proven_and_audited(world)


def test_a_notice_says_that_a_machine_is_held_and_what_to_do(world: World) -> None:
    world.drive()
    news = {notice: message for notice, message, _ in Noticed(world.folder, 0).news(world.records, world.clock.wall())}
    assert "gpurun collect fox-41" in news["held"]


def test_what_a_hostile_machine_says_of_its_outputs_is_bounded(home: Home, tmp_path: Path) -> None:
    world = World(home)
    many = [{"name": "\x1b[2J\n" + "n" * 500, "bytes": -1}] * 100
    outputs(world, elsewhere={"files": 1e300, "bytes": "x", "first": many}, still_working=[{}] * 9, matched=[1])
    assert world.drive() == ExitCode.TRAINING_FAILED
    record = json.dumps(world.all_of(Event.TRAIN_OBSERVED))
    assert len(record) < 20_000
    assert "\\u001b" not in record
    assert len(FINISHED) == 4
