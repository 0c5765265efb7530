"""Tests of a month's budget: before a create, past spending and the worst case of each open run must fit into it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, NoOffer, SetupError, UsageError
from gpurun.core.money import Micros, usd
from gpurun.core.paths import Home
from gpurun.core.settings import load_settings
from gpurun.ledger.budget import Budgets, MonthBudget
from tests.refusals import refusal


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path).prepare()
    home.config.write_text("budget.month = 50")
    return home


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp())


@pytest.fixture
def budget(home: Home, clock: VirtualClock) -> MonthBudget:
    return MonthBudget(home, clock)


def test_what_is_held_and_what_is_spent_leave_the_rest(budget: MonthBudget, clock: VirtualClock) -> None:
    until = clock.wall() + 3600
    budget.hold("a", "fox-41", usd(25), until)
    budget.hold("a", "fox-41", usd(25), until)
    with refusal(NoOffer, "budget.month", "$26.00", "$50.00", "$0.00", "fox-41", "$25.00") as over:
        budget.hold("b", "owl-07", usd(26), until)
    assert over.value.exit_code is ExitCode.NO_OFFER
    budget.hold("b", "owl-07", usd(25), until)
    budget.settle("b", usd(0), "")
    budget.settle("a", usd(10), "receipt")
    budget.hold("c", "elk-33", usd(40), until)
    with refusal(NoOffer, "budget.month", "$10.00", "elk-33", "$40.00"):
        budget.hold("d", "owl-08", usd(1), until)


def test_of_two_that_ask_at_once_one_gets_the_money(home: Home, clock: VirtualClock) -> None:
    def asks(name: str) -> bool:
        try:
            MonthBudget(home, clock).hold(name, name, usd(30), clock.wall() + 60)
        except NoOffer:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(asks, "abcdef")) == [False] * 5 + [True]


def test_an_unsettled_hold_ends_with_its_deadlines_month(budget: MonthBudget, clock: VirtualClock) -> None:
    """A process died between its hold and its create, and no process settled the hold: it must end with its month."""
    budget.hold("a", "fox-41", usd(50), clock.wall() + 3600)
    clock.sleep(4 * 86400)
    with pytest.raises(NoOffer):
        budget.hold("b", "owl-07", usd(1), clock.wall() + 60)
    clock.sleep(86400)
    budget.hold("b", "owl-07", usd(50), clock.wall() + 60)


def test_without_a_limit_it_is_only_written_down(home: Home, budget: MonthBudget, clock: VirtualClock) -> None:
    home.config.write_text("")
    budget.hold("a", "fox-41", usd(1000), clock.wall() + 60)
    home.config.write_text("[budget]\nmonth = 1001")
    with pytest.raises(NoOffer):
        budget.hold("b", "owl-07", usd(2), clock.wall() + 60)


def test_a_file_that_is_damaged_is_named_and_nothing_is_rented(home: Home, budget: MonthBudget) -> None:
    (home.root / "budget.json").write_text("{")
    with refusal(SetupError, "budget.unreadable"):
        budget.hold("a", "fox-41", usd(1), 0.0)


@pytest.mark.parametrize("wrong", ["-1", '"much"', "0"])
def test_a_limit_that_is_not_an_amount_is_refused_where_set(home: Home, wrong: str) -> None:
    home.config.write_text(f"budget.month = {wrong}")
    with pytest.raises(UsageError, match=r"budget\.month .*config\.toml"):
        load_settings(home, project=home.root, environment={})


class WeekBudget(MonthBudget):
    """A second budget in a separate file, whose name sorts after the month's."""

    name = "week"

    @property
    def path(self) -> Path:
        return self._home.root / "week.json"

    def limit(self) -> Micros:
        return usd(10)


def test_a_rental_is_held_in_every_budget_or_in_none(home: Home, clock: VirtualClock) -> None:
    month, week = MonthBudget(home, clock), WeekBudget(home, clock)
    both = Budgets([week, month])
    both.hold("a", "fox-41", usd(8), clock.wall() + 60)
    assert (month.left(), week.left()) == (usd(42), usd(2))
    with pytest.raises(NoOffer):
        both.hold("b", "owl-07", usd(3), clock.wall() + 60)
    assert (month.left(), week.left()) == (usd(42), usd(2)), "what the month held for it is let go"
    with pytest.raises(NoOffer):
        both.hold("a", "fox-41", usd(11), clock.wall() + 60)
    assert (month.left(), week.left()) == (usd(39), usd(2)), "what was held before may have been asked for"
    both.settle("a", usd(1))
    assert (month.left(), week.left()) == (usd(49), usd(9))
