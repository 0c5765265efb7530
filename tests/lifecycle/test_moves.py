"""A run that continues on another machine where one is taken away or lost: for which ends, from where, for how much.

Whole runs in virtual time, on simulated clouds with a meter of their own; the far side trains and saves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_events import StepFailed
from gpurun.core.journal_records import Event, Phase, RunState
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger.audit import audit
from gpurun.ledger.audit.event_sequence import order_problems
from gpurun.ledger.budget import MonthBudget
from gpurun.ledger.run_state import Step, may_move, next_step
from gpurun.ledger.runs import look_at_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.readers.run_status import run_data, run_row
from tests.changed_plan import changed_plan
from tests.emulators.fake import Fault
from tests.simulation.checker import check
from tests.simulation.plans import RUN
from tests.simulation.play import Stage
from tests.simulation.scenario import Scenario


class Voyage:
    """One run on simulated clouds. `at` has what happens once the trainer has come to a step, on the nth machine."""

    def __init__(self, root: Path, *profiles: str, **more: Any) -> None:
        told: dict[str, Any] = {"train_s": 120.0, "machines": 5, "legs": 5, **more}
        self.stage = Stage(Scenario(0, profiles or ("runpod",), **told), root)
        self.played = self.stage.played
        self.at: dict[tuple[int, int], Callable[[], None]] = {}

    @property
    def boxes(self) -> list[Any]:
        return [box for cloud in self.played.clouds.values() for box in cloud.boxes]

    def take(self) -> None:
        """The provider takes away whatever runs."""
        for cloud in self.played.clouds.values():
            cloud.take()

    def take_at(self, *steps: int) -> None:
        """Each machine is taken at a step, one after the other."""
        for place, step in enumerate(steps, start=1):
            self.at[place, step] = self.take

    @contextmanager
    def _watched(self) -> Iterator[None]:
        reach = self.stage._reach

        def watched(instance: Any) -> Any:
            far = reach(instance)
            far.during = lambda: self._look(far)
            return far

        self.stage._reach = watched  # type: ignore[method-assign]
        yield

    def _look(self, far: Any) -> None:
        machine = [box.id for box in self.boxes].index(far._box_id) + 1
        for place, step in sorted(self.at):
            if place == machine and far._step >= step:
                self.at.pop((place, step))()

    def drive(self) -> str:
        """Drive once; the name of the exit code, or the code of the error."""
        with self.stage.set_up(), self._watched():
            return self.stage.drive().words

    @property
    def legs(self) -> list[dict[str, Any]]:
        return [one.data for one in self.played.records if one.event is Event.LEG_PLANNED]

    @property
    def failures(self) -> list[str]:
        return [one.data["code"] for one in self.played.records if one.event is Event.STEP_FAILED]

    @property
    def receipt(self) -> Any:
        return read_receipt(self.played.home, self.played.folder).predicate

    def problems(self) -> list[str]:
        """What the judge of the simulation and the audit find."""
        rows = audit(self.played.home).rows
        return [*check(self.played), *(problem for row in rows for problem in row.problems)]


@pytest.fixture
def voyage(tmp_path: Path) -> Voyage:
    return Voyage(tmp_path)


def test_taken_twice_it_continues_from_its_newest_checkpoint_as_one_run(voyage: Voyage) -> None:
    voyage.take_at(12, 23)
    assert voyage.drive() == "DONE"
    assert [leg["step"] for leg in voyage.legs] == [10, 20]
    told = voyage.receipt
    assert [leg["leg"] for leg in told["legs"]] == [1, 2, 3]
    assert [leg["again"] for leg in told["legs"]] == [0, 2, 3]
    assert "taken" in told["legs"][0]["why"] or "ended" in told["legs"][0]["why"]
    assert "why" not in told["legs"][2]
    assert sum(leg["micros"] for leg in told["legs"]) == told["cost"]["upper_bound_micros"]
    assert told["cost"]["cap_kept"] is True
    assert len(told["teardown"]["evidence"]) == 3
    assert voyage.problems() == []


def test_without_the_flag_a_machine_that_is_taken_ends_the_run_as_ever(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=0)
    reach = voyage.stage._reach

    def taken(instance: Any) -> Any:
        far = reach(instance)
        far.during = lambda: voyage.take() if far.clock.monotonic() > far.started_s + 30 else None
        return far

    voyage.stage._reach = taken  # type: ignore[method-assign]
    with voyage.stage.set_up():
        assert voyage.stage.drive().words == "TRAINING_FAILED"
    assert voyage.legs == []
    assert "legs" not in voyage.receipt
    assert "legs" not in voyage.receipt["asked"]


def test_without_a_checkpoint_it_starts_again_once_and_then_ends(voyage: Voyage) -> None:
    voyage.take_at(3, 3, 3)
    assert voyage.drive() == "TRAINING_FAILED"
    assert [leg["step"] for leg in voyage.legs] == [0]
    assert voyage.failures[-1] == "move.fruitless"
    assert len(voyage.boxes) == 2
    assert voyage.problems() == []


def test_two_machines_without_a_new_checkpoint_end_it_and_one_does_not(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=9, machines=9)
    voyage.take_at(7, 8, 12, 13, 14)
    assert voyage.drive() == "TRAINING_FAILED"
    assert [leg["step"] for leg in voyage.legs] == [5, 5, 10, 10]
    assert voyage.failures[-1] == "move.fruitless"


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it(voyage: Voyage) -> None:
    def spoil_and_take() -> None:
        (voyage.played.folder.artifacts / "checkpoints" / "000015.optim.safetensors").write_bytes(b"spoilt")
        voyage.take()

    voyage.at[1, 17] = spoil_and_take
    assert voyage.drive() == "DONE"
    assert [leg["step"] for leg in voyage.legs] == [10]
    assert voyage.legs[0]["reached"] == 17
    assert check(voyage.played) == []


def test_it_is_on_no_more_machines_than_were_agreed_to(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=2)
    voyage.take_at(7, 12)
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.legs"
    assert len(voyage.boxes) == 2


def test_what_ends_it_is_why_it_did_not_move(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=1)
    voyage.take_at(7)
    assert voyage.drive() == "TRAINING_FAILED"
    failure = look_at_run(voyage.played.home, RUN).state.failure
    assert failure is not None
    assert (failure.code, voyage.receipt["training"]["failed_step"]["code"]) == ("move.legs", "move.legs")
    assert "--from" in failure.hint
    assert voyage.problems() == []


def test_a_cap_that_pays_no_further_start_up_ends_it_and_says_what_is_left(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, machines=1)
    voyage.take_at(7)
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.boxes) == 1
    assert voyage.problems() == []


def test_sold_out_for_ten_minutes_it_waits_at_no_cost_and_continues(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()
    stock, shown = list(cloud.stock), []

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    voyage.at[1, 7] = sell_out
    offers = cloud.offers

    def watched(*need: Any) -> Any:
        found = offers(*need)
        if not found and not shown:
            shown.append(voyage.stage.true.monotonic())
        if shown and voyage.stage.true.monotonic() > shown[0] + 600:
            cloud.stock = stock
        if shown and not cloud.stock:
            sight = look_at_run(voyage.played.home, RUN)
            shown.append((run_row(sight, voyage.stage.laptop.wall()), run_data(sight, run_row(sight, 0.0))))
        return found

    cloud.offers = watched  # type: ignore[method-assign]
    assert voyage.drive() == "DONE"
    row, told = shown[-1]
    assert row.state.startswith("waiting, $0.00/h")
    assert told["is_waiting"] is True
    gone, asked = (box for box in voyage.boxes)
    assert asked.born_s - (gone.died_s or 0.0) > 600
    assert voyage.problems() == []


def test_sold_out_for_longer_than_it_may_wait_it_ends_and_says_why(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    voyage.at[1, 7] = sell_out
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert voyage.problems() == []


def test_refused_creates_are_asked_for_again_until_one_is_taken(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()

    def take() -> None:
        voyage.take()
        cloud.script["create"] = [Fault.FULL, Fault.FULL, Fault.FULL]

    voyage.at[1, 12] = take
    assert voyage.drive() == "DONE"
    assert len(voyage.legs) == 4
    assert {leg["number"] for leg in voyage.legs} == {2}
    assert [bool(leg.get("token")) for leg in voyage.legs] == [True, False, False, False]
    assert voyage.problems() == []


def test_after_the_time_until_which_it_may_wait_no_machine_is_asked_for(voyage: Voyage) -> None:
    until_wall = voyage.stage.laptop.wall() + 100.0
    choices = voyage.played.plan.choices.model_copy(update={"until_wall": until_wall})
    voyage.played.folder.plan.write_text(changed_plan(voyage.played.plan, {"choices": choices}).to_json())

    voyage.take_at(12)
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.boxes) == 1


def test_a_machine_that_shows_itself_while_another_is_waited_for_is_ended_soon(voyage: Voyage) -> None:
    choices = voyage.played.plan.choices.model_copy(update={"wait_s": 3600})
    voyage.played.folder.plan.write_text(changed_plan(voyage.played.plan, {"choices": choices}).to_json())
    (cloud,) = voyage.played.clouds.values()
    stock, offers = list(cloud.stock), cloud.offers

    def sell_out() -> None:
        cloud._late.append((cloud.now + 300.0, cloud.boxes[0].order))
        voyage.take()
        cloud.stock = ()

    def restocked(*need: Any) -> Any:
        cloud.stock = stock if not cloud.boxes or cloud.now > (cloud.boxes[0].died_s or cloud.now) + 1500 else ()
        return offers(*need)

    voyage.at[1, 12] = sell_out
    cloud.offers = restocked  # type: ignore[method-assign]
    assert voyage.drive() == "DONE"
    _, late, last = cloud.boxes
    assert late.died_s is not None
    assert late.died_s - late.born_s < 600
    assert late.died_s < last.born_s


def test_creates_that_are_refused_for_too_long_end_it(voyage: Voyage) -> None:
    (cloud,) = voyage.played.clouds.values()

    def take() -> None:
        voyage.take()
        cloud.script["create"] = [Fault.FULL] * 99

    voyage.at[1, 12] = take
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.legs) < 15
    assert voyage.problems() == []


def test_the_next_lease_is_as_long_as_what_is_left_of_the_cap_pays(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, machines=2)
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    first, second = (one.data for one in voyage.played.records if one.event is Event.CREATE_INTENDED)
    (leg,) = voyage.legs
    assert first["worst_micros"] < second["worst_micros"] <= leg["left_micros"]
    assert second["worst_micros"] > 0.99 * leg["left_micros"], "it is not cut shorter than that"
    assert voyage.problems() == []


def test_a_create_without_a_clear_answer_counts_whole_for_the_next_machine(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, machines=9)
    (cloud,) = voyage.played.clouds.values()
    cloud.script["create"] = [Fault.DROPPED]
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    first, _, _ = (one.data for one in voyage.played.records if one.event is Event.CREATE_INTENDED)
    (leg,) = voyage.legs
    assert leg["spent_micros"] == first["worst_micros"] + voyage.receipt["legs"][0]["micros"]
    assert voyage.problems() == []


def test_no_machine_is_taken_that_nothing_but_this_laptop_ends(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, "runpod", "lambda")

    def sell_out() -> None:
        voyage.take()
        voyage.played.clouds["runpod"].stock = ()

    voyage.at[1, 7] = sell_out
    assert voyage.drive() == "TRAINING_FAILED"
    assert voyage.failures[-1] == "move.no_offer"
    assert len(voyage.boxes) == 1


def test_a_region_that_took_two_machines_within_an_hour_is_passed_over(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, "runpod", "aws")
    voyage.take_at(7, 12)
    assert voyage.drive() == "DONE"
    asked = [one.data["provider"] for one in voyage.played.records if one.event is Event.CREATE_INTENDED]
    assert asked == ["runpod", "runpod", "aws"]
    assert voyage.problems() == []


def test_a_dearer_offer_than_was_agreed_to_is_not_taken(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path)
    (cloud,) = voyage.played.clouds.values()

    def take_and_raise() -> None:
        voyage.take()
        rate = cloud.stock[0].rate_micros_per_hour
        cloud.stock = [one.model_copy(update={"rate_micros_per_hour": rate + 1}) for one in cloud.stock]

    voyage.at[1, 7] = take_and_raise
    assert voyage.drive() == "TRAINING_FAILED"
    assert len(voyage.boxes) == 1
    assert voyage.failures[-1] == "move.no_offer"


@pytest.mark.parametrize("how", ["save", "destroy"])
def test_a_stop_while_it_looks_for_a_machine_ends_the_run(voyage: Voyage, how: Any) -> None:
    (cloud,) = voyage.played.clouds.values()

    def sell_out() -> None:
        voyage.take()
        cloud.stock = ()

    voyage.at[1, 7] = sell_out
    offers, asked = cloud.offers, []

    def stopped(*need: Any) -> Any:
        asked.append(need)
        if len(asked) == 3:
            ask_to_stop(voyage.played.folder, how, by="user", reason="enough")
        return offers(*need)

    cloud.offers = stopped  # type: ignore[method-assign]
    assert voyage.drive() in ("INTERRUPTED", "TRAINING_FAILED")
    assert len(asked) == 3
    assert voyage.legs == []
    assert voyage.problems() == []


def test_a_second_machine_of_the_first_leg_that_shows_late_is_ended_and_paid(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path)
    (cloud,) = voyage.played.clouds.values()
    orders = []

    def take() -> None:
        orders.append(cloud.boxes[0].order)
        voyage.take()

    voyage.at[1, 12] = take
    voyage.at[2, 14] = lambda: cloud._late.append((cloud.now, orders[0]))
    assert voyage.drive() == "DONE"
    late = cloud.boxes[2]
    assert late.order.token == cloud.boxes[0].order.token
    assert late.died_s is not None
    told = voyage.receipt["cost"]
    assert [len(one.get("extras", [])) for one in told["rentals"]] == [1, 0]
    assert cloud.metered() <= told["upper_bound_micros"]
    assert cloud.metered() <= told["cap_micros"]


def test_each_machine_is_settled_in_the_months_budget_once_it_is_proven_gone(voyage: Voyage) -> None:
    budget = MonthBudget(voyage.played.home, voyage.stage.laptop)
    held: list[tuple[int, bool]] = []

    def look() -> None:
        held.extend((one.micros, one.is_spent) for one in budget.entries())

    voyage.take_at(12)
    voyage.at[2, 14] = look
    assert voyage.drive() == "DONE"
    assert sorted(is_spent for _, is_spent in held) == [False, True]
    (spent,) = [micros for micros, is_spent in held if is_spent]
    assert spent == voyage.receipt["legs"][0]["micros"]
    assert sum(one.micros for one in budget.entries()) == voyage.receipt["cost"]["upper_bound_micros"]


def test_the_plan_of_a_leg_that_is_lost_still_lets_its_machine_be_ended(voyage: Voyage) -> None:
    def lose_plan() -> None:
        for path in voyage.played.folder.legs.iterdir():
            path.unlink()
        ask_to_stop(voyage.played.folder, "destroy", by="user", reason="enough")

    voyage.take_at(12)
    voyage.at[2, 14] = lose_plan
    assert voyage.drive() == "INTERRUPTED"
    assert all(box.died_s is not None for box in voyage.boxes)


def test_the_audit_finds_a_second_machine_that_was_asked_for_before_the_first_was_gone(voyage: Voyage) -> None:
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    records = list(voyage.played.records)
    assert list(order_problems(records)) == []
    events = [one.event for one in records]
    proof = events.index(Event.DEATH_PROVEN)
    told = " ".join(order_problems([*records[:proof], *records[proof + 1 :]]))
    assert "the machine before it was not proven gone" in told
    assert "a second machine was requested before the first was proven gone" in told


def test_the_audit_finds_a_leg_that_the_cap_did_not_pay(voyage: Voyage) -> None:
    voyage.take_at(12)
    assert voyage.drive() == "DONE"
    records = list(voyage.played.records)
    place = [i for i, one in enumerate(records) if one.event is Event.CREATE_INTENDED][-1]
    dear = records[place].model_copy(
        update={"data": {**records[place].data, "worst_micros": voyage.played.plan.cap_micros}}
    )
    records[place] = type(dear).model_validate(dear.model_dump())
    assert any("left of the cap" in problem for problem in order_problems(records))


_LOST = StepFailed(step="collect", code="machine.lost", message="", exit_code=ExitCode.TRAINING_FAILED)
_FULL = StepFailed(step="create", code="create.no_capacity", message="", exit_code=ExitCode.NO_OFFER)


@pytest.mark.parametrize(
    ("told", "moves"),
    [
        ({"outcome": "lost", "reason": "lost", "failure": _LOST}, True),
        ({"outcome": "failed", "reason": "preempted"}, True),
        ({"failure": _LOST}, True),
        ({"outcome": "done", "failure": _LOST}, True),
        ({"phase": Phase.OPENED, "failure": _FULL}, True),
        ({"outcome": "failed", "reason": "nonfinite"}, False),
        ({"outcome": "failed", "reason": "oom", "failure": _LOST}, False),
        ({"outcome": "done"}, False),
        ({"outcome": "stopped", "reason": "lease"}, False),
        ({"outcome": "lost", "stop": "save"}, False),
        ({"outcome": "lost", "stop": "destroy", "reason": "lease"}, False),
        ({"outcome": "lost", "stays": True}, False),
        ({"outcome": "lost", "legs": 0}, False),
        ({"failure": _FULL}, False),
    ],
)
def test_only_the_journals_outcome_decides_what_moves(told: dict[str, Any], moves: bool) -> None:
    state = RunState(**{"run": RUN, "phase": Phase.GONE, "legs": 5, **told})
    assert may_move(state) is moves
    assert next_step(state) is (Step.MOVE if moves else Step.SETTLE)


def test_a_plan_that_does_not_move_is_written_as_ever(tmp_path: Path) -> None:
    voyage = Voyage(tmp_path, legs=0)
    assert "leg" not in json.loads(voyage.played.folder.plan.read_text())
