"""Tests of `gpurun budget`: the amount left, what each run holds and until when, and the spending in the receipts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.ledger.budget import MonthBudget
from tests.unit.ledger_samples import finished_run


@pytest.fixture
def home(own_home: Path) -> Home:
    home = Home(own_home).prepare()
    finished_run(home)
    return home


def test_the_month_says_what_is_spent_held_by_whom_and_left(home: Home, gpurun: Any) -> None:
    (home.root / "config.toml").write_text('budget.month = "50"\n')
    clock = SystemClock()
    month = MonthBudget(home, clock)
    month.hold("gr-1", "elk-42", usd(5), clock.wall() + 3600)
    month.hold("gr-2", "fox-41", usd(9), clock.wall() + 60)
    month.settle("gr-2", usd("2.37"), "a" * 64)
    code, out, _ = gpurun("budget")
    assert code == 0
    (sums,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["month"]]
    assert sums == ["month", "$50.00", "$2.37", "$5.00", "$42.63"]
    (budget,) = json.loads(gpurun("budget", "--json")[1])["data"]["budgets"]
    assert (budget["limit_micros"], budget["left_micros"]) == (50_000_000, 42_630_000)
    assert [(hold["run"], hold["micros"]) for hold in budget["held"]] == [("elk-42", 5_000_000)]


def test_receipts_are_added_up_by_month_provider_and_job(home: Home, gpurun: Any) -> None:
    (first,) = json.loads(gpurun("budget", "--json")[1])["data"]["spent"]
    assert (first["provider"], first["runs"], first["micros"] > 0) == ("runpod", 1, True)
    finished_run(home, "elk-42")
    data = json.loads(gpurun("budget", "--json")[1])["data"]
    assert data["spent"] == [first | {"runs": 2, "micros": 2 * first["micros"]}]
    assert data["unread"] == []
    assert json.loads(gpurun("budget", "--month", "1999-01", "--json")[1])["data"]["spent"] == []
    home.run("elk-42").receipt.write_bytes(b"{}")
    data = json.loads(gpurun("budget", "--json")[1])["data"]
    assert (data["spent"][0]["runs"], data["unread"]) == (1, ["elk-42"])
    assert "elk-42" in gpurun("budget")[1]


def test_without_a_limit_it_says_how_to_set_one(home: Home, gpurun: Any) -> None:
    assert "budget.month = 50" in gpurun("budget")[1]
    code, _, err = gpurun("budget", "--month", "2026-13")
    assert (code, "usage.month" in err) == (2, True)
