"""Tests of the month's limit: checked between a run's intent and its create, and settled when the end is proven."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import Instance, Order
from gpurun.ledger.budget import Budgets, MonthBudget
from gpurun.lifecycle.context import Context
from gpurun.providers.base import Throttled
from tests.lifecycle.scripted_cloud import Killed, World


class Limited(World):
    """A world whose runs count against the home's limit for the month."""

    @property
    def context(self) -> Context:
        return replace(super().context, budgets=Budgets([MonthBudget(self.home, self.clock)]))

    def limit(self, micros: int) -> None:
        self.home.config.write_text(f"budget.month = {micros / 1e6:.2f}")

    def held(self) -> list[int]:
        return [entry["micros"] for entry in json.loads((self.home.root / "budget.json").read_bytes()).values()]


@pytest.fixture
def world(tmp_path: Path) -> Limited:
    return Limited(Home(tmp_path))


def test_a_run_is_held_at_its_worst_and_settled_at_what_it_cost(world: Limited) -> None:
    world.cloud.killing = "after create"
    assert world.drive() == "killed"
    assert world.held() == [world.plan.worst_micros]
    world.cloud.killing = ""
    assert world.drive() is ExitCode.DONE
    (spent,) = world.held()
    assert world.cloud.metered() <= spent < world.plan.worst_micros


def test_a_supervisor_killed_before_settling_settles_on_restart(
    world: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(MonthBudget, "settle", killed)
        assert world.drive() == "killed"
    assert world.held() == [world.plan.worst_micros]
    assert world.drive() is ExitCode.DONE
    (spent,) = world.held()
    assert spent < world.plan.worst_micros


def test_a_proven_end_frees_its_money_before_the_receipt(world: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unspent money must be free once the end is proven: reading the bill for the receipt may take half an hour."""

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("gpurun.lifecycle.steps.close_run.write_receipt", killed)
        assert world.drive() == "killed"
    (spent,) = world.held()
    assert world.cloud.metered() <= spent < world.plan.worst_micros
    assert MonthBudget(world.home, world.clock).left() is None, "there is no limit yet"
    world.limit(world.plan.worst_micros)
    left = MonthBudget(world.home, world.clock).left()
    assert left is not None
    assert left + spent == round(world.plan.worst_micros, -4), "the limit is written in cents"


def test_what_the_month_does_not_pay_for_is_not_asked_for(world: Limited) -> None:
    world.limit(world.plan.worst_micros - 20_000)
    assert world.drive() is ExitCode.NO_OFFER
    assert world.cloud.created == 0
    assert world.all_of(Event.CREATE_REFUSED)[0]["reason"] == "not_sent"
    assert "budget.month" in world.all_of(Event.STEP_FAILED)[0]["code"]


def test_what_a_refused_offer_held_is_free_for_the_next(world: Limited) -> None:
    world.limit(world.plan.worst_micros + 20_000)
    create, answers = world.cloud.create, [Throttled("429")]

    def once_too_many(order: Order) -> Instance:
        if answers:
            raise answers.pop()
        return create(order)

    world.cloud.create = once_too_many  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert len(world.held()) == 1
