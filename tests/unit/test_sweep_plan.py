"""Tests of a sweep's plan: how many trials share a card, what the cap pays for, and what gpurun refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import NoOffer, UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Leg, LegFile, Plan, Request
from gpurun.core.sweep import Range, make_sweep, parse_axis
from gpurun.core.trainer_events import TrialEvent, later_of_trial, make_event
from gpurun.jobs.sweep import SweepJob
from gpurun.planning.place import Desk
from gpurun.planning.planner import make_plan
from gpurun.planning.sweep_proposal import sweep_proposal
from gpurun.planning.trainer_proposal import TrainerProposal
from gpurun.providers.catalog import parse_gpu
from gpurun.view.plan_screen import plan_text
from gpurun.view.style import Style

TWELVE = ("optim.lr=1e-3,3e-3,1e-4", "train.seed=1,2,3,4")


def request(recipe: str, gpu: str, cap: str) -> Request:
    choices = Choices(guard=True)
    need, most = parse_gpu(gpu), usd(cap)
    return Request(recipe=recipe, gpu=need, max_cost_micros=most, providers=("lambda",), choices=choices)


def desk(tmp_path: Path) -> Desk:
    return Desk("fox-41", Home(tmp_path / "home").prepare(), SystemClock(), print)


def planned(
    tmp_path: Path, recipe: str, gpu: str = "1xA10", cap: str = "2000", *, sets: Any = TWELVE, **options: Any
) -> Plan:
    sweep = make_sweep(dict(map(parse_axis, sets)), options)
    wanted = request(recipe, gpu, cap).model_copy(update={"sweep": sweep})
    proposal = sweep_proposal(wanted, desk(tmp_path), is_asked=False, admit=lambda _: None)
    return make_plan(proposal, need_data=False)


def test_small_trials_share_a_card_and_cost_less_than_alone(tmp_path: Path) -> None:
    alone = make_plan(TrainerProposal(request("shakespeare-char", "1xA10", "100"), desk(tmp_path)), need_data=False)
    plan = planned(tmp_path, "shakespeare-char")
    assert 2 <= plan.processes <= 8
    assert plan.processes * plan.estimate.peak_bytes <= plan.offer.vram_gb * 2**30
    assert plan.expected_micros * 4 < 12 * alone.expected_micros
    assert plan.worst_micros < 12 * alone.worst_micros
    shown = plan_text(plan, Style(width=120))
    assert "12 trials (grid) of shakespeare-char" in shown
    assert f"{plan.processes} trials run at once on one card" in shown


def test_large_trials_have_a_card_each(tmp_path: Path) -> None:
    assert planned(tmp_path, "gpt2-124m", "1xA100").processes == 1
    assert planned(tmp_path, "gpt2-124m", "8xA100").processes == 8


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    plan = planned(tmp_path, "mini-gpt", sets=("optim.lr=1e-4..1e-2", "model.layers=2,4"), trials=5, keep=2)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert isinstance(again.job, SweepJob)
    assert again.job.sweep.space["optim.lr"] == Range(low=1e-4, high=1e-2, log=True, whole=False)
    assert again.job.with_settings({"optim.lr": "0.002", "model.layers": "4"}).resolved["model"]["layers"] == 4


def test_a_cap_holds_some_trials_and_is_refused_below_one(tmp_path: Path) -> None:
    whole = planned(tmp_path, "gpt2-124m", "1xA100")
    part = planned(tmp_path, "gpt2-124m", "1xA100", cap="150")
    assert part.worst_micros <= usd(150) < whole.worst_micros
    assert any("of 12 trials; a stop keeps the best" in one for one in part.warnings)
    with pytest.raises(NoOffer) as refused:
        planned(tmp_path, "gpt2-124m", "1xA100", cap="10")
    assert refused.value.code == "offer.over_cap"
    one, every = re.findall(r"--max-cost ([0-9.]+)", refused.value.hint)
    assert planned(tmp_path, "gpt2-124m", "1xA100", cap=one).worst_micros <= usd(one) < usd(every)
    assert planned(tmp_path, "gpt2-124m", "1xA100", cap=every).warnings == whole.warnings


def test_trials_that_a_card_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoOffer, match="memory"):
        planned(tmp_path, "gpt2-124m", sets=("model.width=768,98304",))
    with pytest.raises(UsageError, match="more memory than a card has"):
        planned(tmp_path, "gpt2-124m", at_once=8)
    assert planned(tmp_path, "mini-gpt", at_once=12).processes == 12
    with pytest.raises(UsageError, match="2 nodes, and only "):
        planned(tmp_path, "mini-gpt", "2x8xA100")


def test_checkpoints_and_disk_are_counted_for_all_that_is_kept(tmp_path: Path) -> None:
    one, three = (planned(tmp_path, "shakespeare-char", keep=keep).job for keep in (1, 3))
    assert three.home_bytes == 3 * one.home_bytes
    assert three.disk_gb > one.disk_gb > 0


def test_each_value_and_all_greatest_together_are_looked_at() -> None:
    axes = dict(parse_axis(f"{name}=2,9,10,1") for name in "abcdef")
    looked_at = list(make_sweep(axes, {"sampler": "random", "trials": 5}).corners())
    assert len(looked_at) < 200
    assert dict.fromkeys("abcdef", "10") in looked_at
    assert all(any(one[name] == value for one in looked_at) for name in "abcdef" for value in ("2", "9", "10", "1"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=1e-3,3e-4", ("1e-3", "3e-4")),
        ("betas=[0.9, 0.95],[0.9, 0.99]", ("[0.9, 0.95]", "[0.9, 0.99]")),
        ('name="a,b",c', ('"a,b"', "c")),
        ("lr=1e-4..1e-2", Range(low=1e-4, high=1e-2, log=True, whole=False)),
        ("drop=0.0..0.5", Range(low=0.0, high=0.5, log=False, whole=False)),
        ("layers=2..9", Range(low=2, high=9, log=False, whole=True)),
        ("lr=1,1", ("1",)),
    ],
)
def test_values_are_read_as_they_are_written(text: str, found: Any) -> None:
    assert parse_axis(text)[1] == found


def test_the_next_machine_of_a_run_gets_the_results_of_the_last(tmp_path: Path) -> None:
    plan = planned(tmp_path, "mini-gpt", sets=("optim.lr=1e-4,1e-3",))
    assert plan.job.can_resume
    names = ("outputs/gpurun-sweep/trials.json", "outputs/gpurun-sweep/best/001/checkpoints/000004.model.safetensors")
    files = tuple(LegFile(name=name, bytes=1, sha256="0" * 64, kind="checkpoint", step=3) for name in names)
    leg = Leg(number=2, step=3, files=files, folder=str(tmp_path), spent_micros=usd(1), left_micros=usd(1))
    moved = plan.model_copy(update={"leg": leg, "job": plan.job.resumed(leg)})
    work = moved.job.workload(moved, bundle_root() / "trainer", 2)
    laid = {place: path for place, path in work.uploads.items() if place.startswith("bundle/earlier_sweep/")}
    assert laid == {
        "bundle/earlier_sweep/trials.json": tmp_path / names[0],
        "bundle/earlier_sweep/best/001/checkpoints/000004.model.safetensors": tmp_path / names[1],
    }
    assert not [place for place in work.uploads if place.startswith("data/continue")], "no trial continues from it"
    order = json.loads(bytes(work.uploads["bundle/sweep.json"]))  # type: ignore[arg-type]
    assert order["earlier"][0] == "../earlier_sweep"


def test_a_trial_of_this_run_is_restored_from_no_earlier_run() -> None:
    def event(state: str, *, is_restored: bool) -> TrialEvent:
        found = make_event({"kind": "trial", "trial": 1, "state": state, "seconds": 9.0, "is_restored": is_restored})
        assert isinstance(found, TrialEvent)
        return found

    own, again = event("done", is_restored=False), event("done", is_restored=True)
    assert later_of_trial(None, again).is_restored
    assert not later_of_trial(own, again).is_restored
    assert later_of_trial(again, again).is_restored
