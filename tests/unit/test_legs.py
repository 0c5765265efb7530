"""Tests of the further machines that a run may use within its cap, and of plans that say that a run never moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.money import Micros
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.core.run_plan import Plan
from gpurun.planning.legs import Standing, least_leg_micros, leg_candidates, legs_note, why_it_stays
from tests.changed_plan import changed_plan
from tests.emulators.fake import PROFILES
from tests.simulation.plans import make_plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Return the plan of a two-minute training with one offer and a cap that pays for five machines."""
    return make_plan(Home(tmp_path), [PROFILES["runpod"]], 5, legs=5, train_s=120.0)


def standing(plan: Plan, **more: Any) -> Standing:
    assert plan.cap_micros is not None
    return replace(Standing(step=10, carried_bytes=20_000, left_micros=plan.cap_micros), **more)


def test_a_cap_below_two_start_ups_says_that_it_will_not_move(plan: Plan) -> None:
    least = least_leg_micros(plan)
    assert why_it_stays(plan.model_copy(update={"cap_micros": 2 * least})) == ""
    assert why_it_stays(plan.model_copy(update={"cap_micros": 2 * least - 1}))


def test_what_names_no_checkpoint_will_not_move(plan: Plan, tmp_path: Path) -> None:
    box = make_plan(Home(tmp_path / "box"), [PROFILES["runpod"]], 5, legs=5, train_s=120.0, kind="dev_box")
    assert not box.job.can_resume
    assert why_it_stays(box)


def test_the_plan_counts_machines_and_makes_up_no_probability(plan: Plan, tmp_path: Path) -> None:
    least, silent = least_leg_micros(plan), plan.offer.model_copy(update={"on_demand_micros_per_hour": None})
    quiet = changed_plan(plan, {"offer": silent, "cap_micros": 3 * least})
    first, *rest = legs_note(quiet, Home(tmp_path / "empty"))
    assert "3 of them" in first
    assert len(rest) == 1, "nothing of reclaims, nor of a price on demand that nobody told"
    assert len(list(legs_note(plan, Home(tmp_path / "empty")))) == 3, "what on demand costs, where that was told"
    assert "2 of them" in next(iter(legs_note(_agreed(plan, legs=2), Home(tmp_path / "empty"))))


def test_a_card_that_the_plan_did_not_name_is_passed_over(plan: Plan) -> None:
    known = plan.offer
    (found,) = leg_candidates(plan, [known], standing(plan))
    assert found.offer == known
    for other in ({"gpu": "T4"}, {"vram_gb": 16}, {"gpu_count": 2}, {"nodes": 2}):
        assert leg_candidates(plan, [known.model_copy(update=other)], standing(plan)) == []


def test_a_small_card_of_the_plan_keeps_its_smaller_micro_batch(plan: Plan) -> None:
    small = plan.offer.model_copy(update={"gpu": "T4", "vram_gb": 16, "rate_micros_per_hour": Micros(100_000)})
    fits = plan.estimate.model_copy(update={"micro_batch": 3})
    both = (plan.chosen, plan.chosen.model_copy(update={"offer": small, "estimate": fits}))
    found = leg_candidates(changed_plan(plan, {"candidates": both}), [plan.offer, small], standing(plan))
    assert [one.offer for one in found] == [small, plan.offer], "the fewest dollars first"
    assert [one.estimate.micro_batch for one in found] == [3, plan.estimate.micro_batch]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"spot": False}, id="on demand, where spot was asked for"),
        pytest.param({"dies_by_itself": "NO, only this computer ends it"}, id="a weaker guard"),
        pytest.param({"rate_micros_per_hour": Micros(10**9)}, id="dearer than agreed"),
    ],
)
def test_a_machine_that_was_not_agreed_to_is_passed_over(plan: Plan, other: dict[str, Any]) -> None:
    assert leg_candidates(plan, [plan.offer.model_copy(update=other)], standing(plan)) == []


def test_what_is_left_of_the_cap_is_the_bound_of_every_candidate(plan: Plan) -> None:
    left = Micros(2 * least_leg_micros(plan))
    (found,) = leg_candidates(plan, [plan.offer], standing(plan, left_micros=left))
    assert found.worst_micros is not None
    assert found.worst_micros <= left
    too_little = Micros(least_leg_micros(plan) // 2)
    assert leg_candidates(plan, [plan.offer], standing(plan, left_micros=too_little)) == []


def test_carried_files_cost_and_avoided_places_are_passed_over(plan: Plan) -> None:
    (light,) = leg_candidates(plan, [plan.offer], standing(plan))
    (heavy,) = leg_candidates(plan, [plan.offer], standing(plan, carried_bytes=2_000_000_000))
    assert (heavy.expected_micros or 0) > (light.expected_micros or 0)
    assert heavy.lease is not None
    assert light.lease is not None
    assert heavy.lease.ship_s > light.lease.ship_s
    here = frozenset({(plan.offer.provider, plan.offer.region)})
    assert leg_candidates(plan, [plan.offer], standing(plan, avoided=here)) == []
    assert leg_candidates(plan, [_elsewhere(plan.offer)], standing(plan, avoided=here)) != []


def _agreed(plan: Plan, **more: Any) -> Plan:
    return plan.model_copy(update={"choices": plan.choices.model_copy(update=more)})


def _elsewhere(offer: Offer) -> Offer:
    return offer.model_copy(update={"region": "elsewhere"})
