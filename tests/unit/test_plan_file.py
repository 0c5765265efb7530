"""Tests of `plan -o FILE` and `train FILE`: the file is a request to quote and confirm again, not an approval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpurun.cli.options import REQUEST, request_from
from gpurun.cli.session import Session
from gpurun.core.clock import SystemClock
from gpurun.core.errors import UsageError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.run_plan import Choices, Plan, Request
from gpurun.planning.plan_file import plan_file, read_plan_file
from gpurun.providers import catalog
from tests.plan_makers import make_plan
from tests.refusals import refusal

ASKED = Request(recipe="mini-gpt", max_cost_micros=usd(1), overrides=("train.steps=200",), providers=("runpod",))
NONE = {name: usual for name, (_, usual) in REQUEST.flags.items()}


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: [])


def planned(home: Path, request: Request) -> Plan:
    return make_plan(request, run="fox-41", home=Home(home).prepare(), clock=SystemClock(), say=print, need_data=False)


def written(folder: Path, request: Request = ASKED) -> Path:
    path = folder / "plan.json"
    path.write_text(plan_file(request, planned(folder, request), 1_800_000_000.0))
    return path


def typed(path: Path, **flags: object) -> Request:
    return request_from(Session(home=Home(path.parent)), **{**NONE, "recipe": str(path), **flags})


def test_a_plan_file_returns_the_request_and_quotes_it_as_typed(tmp_path: Path) -> None:
    back = typed(written(tmp_path))
    assert back.model_copy(update={"quoted": None}) == ASKED
    plan = planned(tmp_path, back)
    assert (plan.worst_micros, plan.warnings) == (planned(tmp_path, ASKED).worst_micros, ())


def test_the_users_own_cap_holds_against_a_strangers_plan_file(tmp_path: Path) -> None:
    dear = written(tmp_path, ASKED.model_copy(update={"max_cost_micros": usd(90_000)}))
    (tmp_path / "config.toml").write_text("max_cost = 25")
    assert (typed(dear).max_cost_micros, typed(dear).cap_from) == (usd(25), "user file config.toml")
    assert typed(dear, max_cost="30").max_cost_micros == usd(30)
    assert typed(written(tmp_path)).max_cost_micros == usd(1), "a lower one stands"


def test_the_cap_holds_for_todays_price_beside_yesterdays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = typed(written(tmp_path))
    dearer = tuple(
        offer.model_copy(update={"rate_micros_per_hour": 2 * offer.rate_micros_per_hour})
        for offer in catalog.all_offers()
    )
    monkeypatch.setattr(catalog, "all_offers", lambda: dearer)
    plan = planned(tmp_path, back)
    (warning,) = plan.warnings
    assert "2027-01-15" in warning
    assert "runpod 1×A40 48G at $0.44/h; now $" in warning
    assert warning.endswith("on runpod 1×A40 48G at $0.88/h.")
    assert plan.worst_micros <= usd(1)


def test_a_recipe_that_changed_since_is_told(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    bundled = (Path(__file__).parents[2] / "recipes" / "mini-gpt.toml").read_text()
    recipe.write_text(bundled)
    path = written(tmp_path, ASKED.model_copy(update={"recipe": str(recipe)}))
    recipe.write_text(bundled.replace("lr = 3e-4", "lr = 6e-4"))
    assert "recipe" in planned(tmp_path, typed(path)).warnings[-1]


def test_no_consent_comes_from_a_file_and_a_new_cap_may_be_given(tmp_path: Path) -> None:
    request = ASKED.model_copy(update={"choices": Choices(weak_lease=True), "providers": ("lambda",)})
    path = written(tmp_path, request)
    assert not typed(path).choices.weak_lease
    assert typed(path, accept_weak_lease=True).choices.weak_lease
    assert typed(path, max_cost="0.50").max_cost_micros == usd("0.50")


def test_paths_in_it_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    assert typed(written(tmp_path, ASKED.model_copy(update={"data": "text.txt"}))).data == str(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text.replace('"max_cost_micros": 1000000', '"max_cost_micros": 9000000'), "plan_file.edited"),
        (lambda text: text.replace('"v": 1', '"v": 2'), "plan_file.version"),
        (lambda text: text[:-20], "plan_file.malformed"),
        (lambda text: json.dumps({"v": 1, "recipe": "mini-gpt"}), "plan_file.other"),
        (lambda text: "[]", "plan_file.other"),
    ],
)
def test_a_file_that_is_not_what_gpurun_wrote_is_refused(tmp_path: Path, change: object, code: str) -> None:
    path = written(tmp_path)
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(UsageError) as refused:
        read_plan_file(str(path))
    assert refused.value.code == code
    assert "gpurun plan … -o plan.json" in refused.value.hint


def test_a_flag_beside_a_file_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with refusal(UsageError, "plan_file.flags"):
        typed(written(tmp_path), gpu="8xA100")
    with refusal(UsageError, "plan_file.unreadable"):
        read_plan_file(str(tmp_path / "none.json"))
