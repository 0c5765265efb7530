"""Tests that the refusal of a low cap names a cap that is high enough: with that cap the user is not refused again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import NoOffer
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, format_usd, parse_usd, usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.planning.candidates import is_weak
from gpurun.planning.verify_machine import risen_price_refusal
from gpurun.providers.catalog import parse_gpu
from tests.changed_plan import changed_plan
from tests.lifecycle.scripted_cloud import World
from tests.plan_makers import make_plan


def planned(gpu: str, cap: str, **choices: bool) -> Plan:
    """Return the plan under this cap; raise NoOffer if there is none."""
    wanted = Request(recipe="gpt2-124m", gpu=parse_gpu(gpu), max_cost_micros=parse_usd(cap), choices=Choices(**choices))
    home = Home(Path("/nowhere"))
    plan = make_plan(wanted, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)
    assert choices or not is_weak(plan.offer)
    return plan


@pytest.mark.parametrize("gpu", ["1xA100", "8xA100", "1xH100", "8xH100", "1xA10", "8xV100"])
@pytest.mark.parametrize("is_accepted", [False, True])
def test_the_cap_that_a_refusal_names_is_one_that_does(gpu: str, is_accepted: bool) -> None:
    choices = {"weak_lease": True} if is_accepted else {}
    with pytest.raises(NoOffer) as refused:
        planned(gpu, "1", **choices)
    (named,) = re.findall(r"--max-cost ([\d.]+)", refused.value.hint)
    if "--accept-weak-lease" in refused.value.hint:  # Only offers with a weak lease have this GPU.
        choices = {"weak_lease": True}
    assert f"({planned(gpu, named, **choices).offer.provider} " in refused.value.what


@pytest.mark.parametrize("gpu", ["8xA100", "8xA10G"])
def test_the_worst_case_at_a_risen_price_is_the_next_plans(gpu: str) -> None:
    """The worst case in the hint must equal the next plan's, with the disk, address and egress that AWS bills."""
    plan = planned(gpu, "500", weak_lease=True)
    worst = format_usd(plan.worst_micros)
    assert worst in risen_price_refusal(plan, plan.offer.rate_micros_per_hour, "").hint
    assert worst not in risen_price_refusal(plan, Micros(plan.offer.rate_micros_per_hour + usd(1)), "").hint


def test_a_worst_case_over_the_cap_is_refused_with_a_usable_cap(
    tmp_path: Path,
) -> None:
    world = World(Home(tmp_path))
    world.plan = changed_plan(world.plan, {"worst_micros": usd("1234.561")})
    world.folder.plan.write_text(world.plan.to_json())
    world.drive()
    (failed,) = world.all_of(Event.STEP_FAILED)
    assert (failed["code"], world.cloud.created) == ("cap.too_small", 0)
    assert parse_usd(failed["hint"].partition("--max-cost ")[2]) == usd("1234.57")
