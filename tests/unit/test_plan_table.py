"""`gpurun plan` without --gpu: every offer of the catalogue, judged, ranked by the dollars that finishing takes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import UsageError
from gpurun.core.money import parse_usd, usd
from gpurun.core.paths import Home
from gpurun.core.plan import Choices, Plan, Request
from gpurun.lifecycle.plan import make_plan
from gpurun.lifecycle.quotes.quote import WEAK
from gpurun.planning.budget import candidates
from gpurun.planning.catalog import all_offers, parse_gpu
from gpurun.planning.load import load_of
from gpurun.planning.recipe import load_recipe, resolve
from gpurun.view.paint import cells
from gpurun.view.plan import plan_text
from gpurun.view.style import Style

OFFERS = [offer for offer in all_offers() if offer.gpu_count]


def planned(home: Path, cap: str, **asked: object) -> Plan:
    request = Request(recipe="gpt2-124m", max_cost_micros=parse_usd(cap), **asked)  # type: ignore[arg-type]
    return make_plan(request, run="fox-41", home=Home(home).prepare(), clock=SystemClock(), say=print, need_data=False)


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.lifecycle.quotes.renting.ready_providers", lambda home: [])


def test_every_offer_of_the_catalogue_is_judged_and_ranked_by_dollars_to_finish(tmp_path: Path) -> None:
    plan = planned(tmp_path, "25")
    assert sorted(one.offer.model_dump_json() for one in plan.candidates) == sorted(
        offer.model_dump_json() for offer in OFFERS
    )
    finishing = [one for one in plan.candidates if one.finishes]
    assert plan.candidates[: len(finishing)] == tuple(finishing)
    assert [one.expected_micros for one in finishing] == sorted(one.expected_micros for one in finishing)
    assert all(one.worst_micros is not None and one.worst_micros <= usd(25) for one in finishing)
    for one in plan.candidates:
        assert one.estimate.fits
        assert one.estimate.tokens_per_s is not None
        assert one.finishes or one.why_not
        assert one.finishes or one.why_not == WEAK or one.reach is None or one.reach.step < one.reach.steps
    assert Plan.from_json(plan.to_json()) == plan


def test_eight_a100_land_near_the_published_94_minutes_and_20_dollars_and_say_what_that_rests_on(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, "25")
    assert (plan.offer.gpu_count, plan.offer.gpu) == (8, "A100 SXM"), "without --gpu it is the recipe's own"
    assert plan.estimate.likely_s == pytest.approx(94 * 60, rel=0.1)
    assert usd(19) < plan.expected_micros < usd(22)
    assert "llm.c's 94 minutes on 8" in plan.estimate.basis
    assert any("`train` takes the recipe's 8xA100" in note for note in plan.notes)


def test_where_the_recipes_own_gpu_is_too_dear_the_best_of_the_others_is_planned(tmp_path: Path) -> None:
    plan = planned(tmp_path, "20")
    assert plan.offer.gpu_count == 1
    assert plan.worst_micros <= usd(20)
    assert plan.notes[-1].endswith("`train` takes this one with --gpu 1xH100.")
    assert parse_gpu("1xH100").count == 1


def test_with_a_gpu_only_that_is_shown(tmp_path: Path) -> None:
    plan = planned(tmp_path, "25", gpu=parse_gpu("8xA100"))
    assert {(one.offer.gpu_count, one.offer.gpu) for one in plan.candidates} == {(8, "A100 SXM")}


def test_the_shipping_is_counted_from_the_folder_that_data_names_and_one_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "shards").mkdir()
    with (tmp_path / "shards" / "train.bin").open("wb") as sparse:
        sparse.truncate(10**9)
    by_name, by_tilde = (
        planned(tmp_path, "60", data=name, gpu=parse_gpu("8xA100")).lease.ship_s
        for name in (f"{tmp_path}/shards", "~/shards")
    )
    assert by_tilde == by_name > 8 * 10**9 / 20e6
    assert planned(tmp_path, "60", data="~/shards").data.source == "~/shards (not prepared)"
    with pytest.raises(UsageError, match="nowhere is not there"):
        planned(tmp_path, "60", data=str(tmp_path / "nowhere"))


MONEY = ("Provider", "GPU", "$/h", "worst $", "dies by")


@pytest.mark.parametrize(
    ("width", "beside"),
    [
        (60, ()),
        (80, ("Region", "est. $")),
        (100, ("Region", "est. $", "time")),
        (120, ("Region", "est. $", "time", "fit", "tok/s", "boot")),
    ],
)
def test_what_protects_money_is_on_the_screen_before_what_is_nice_to_know(
    tmp_path: Path, width: int, beside: tuple[str, ...]
) -> None:
    lines = plan_text(planned(tmp_path, "25", gpu=parse_gpu("8xA100")), Style(width=width)).splitlines()
    assert all(cells(line) <= width for line in lines)
    heading = next(line for line in lines if "worst $" in line)
    assert all(name in heading for name in (*MONEY, *beside))
    chosen, other, *_ = (line for line in lines if "runpod    8×A100 SXM 80G" in line)
    assert all(word in chosen for word in ("→", "11.12", "25.00", "pod key"))
    assert all(word in other for word in ("14.32", "to 81%", "needs $29.39"))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_last_column_is_never_cut_and_the_flag_stands_whole_below(tmp_path: Path, width: int) -> None:
    lines = plan_text(planned(tmp_path, "45"), Style(width=width)).splitlines()
    rows = [line for line in lines if any(f"  {cloud}  " in f"{line}  " for cloud in ("runpod", "lambda", "aws"))]
    ends = {"pod key", "power-off", "weak lease"}
    assert all(row.endswith(tuple(ends)) or re.search(r"needs \$[\d,.]+$", row) for row in rows)
    assert ends == {end for end in ends if any(row.endswith(end) for row in rows)}
    assert any("--accept-weak-lease " in f"{line} " for line in lines)


def test_an_offer_that_only_this_laptop_ends_says_no_in_capitals(tmp_path: Path) -> None:
    plan = planned(tmp_path, "60", gpu=parse_gpu("8xA100"), choices=Choices(weak_lease=True))
    lines = plan_text(plan, Style(width=80)).splitlines()
    assert any("lambda" in line and line.endswith("  NO") for line in lines)
    assert "NO: nothing but this laptop does" in " ".join(line.strip() for line in lines)


def test_what_is_left_of_the_cap_is_never_rounded_up(tmp_path: Path) -> None:
    plan = planned(tmp_path, "25").model_copy(update={"worst_micros": usd("24.995")})
    assert "left $0.00" in plan_text(plan, Style(width=120))
    over = plan.model_copy(update={"worst_micros": usd("25.001")})
    assert "left -$0.01" in plan_text(over, Style(width=120))


def test_forty_offers_are_planned_well_within_300_ms() -> None:
    full = resolve(load_recipe("gpt2-124m"), "full")
    began = time.process_time()
    found = candidates(OFFERS[:40], full, load_of(full, 50_000_000), cap=parse_usd("25"))
    assert len(found) == 40
    assert time.process_time() - began < 0.3
