"""Tests of the money that a mandate holds for a run, from before its create until the proof of death."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.money import times, usd
from gpurun.core.paths import Home
from gpurun.ledger.budget import RESERVED_S
from gpurun.ledger.mandate import MandateBudget, budgets_of, revoke_mandate, write_mandate
from gpurun.lifecycle.context import Context
from gpurun.providers.base import Unknown
from tests.lifecycle.scripted_cloud import Killed, World


class Mandated(World):
    """A world whose run has a mandate that pays for three runs at this run's worst case."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        worst = self.plan.worst_micros
        terms = {"total_micros": times(worst, 3), "per_run_micros": times(worst, 2), "until_wall": 9e9, "root": "/x"}
        self.mandate, _ = write_mandate(home, self.clock, **terms)
        self.budget = MandateBudget(home, self.clock, self.mandate.id)

    @property
    def context(self) -> Context:
        budgets = budgets_of(self.home, self.clock, self.mandate.id)
        return replace(super().context, budgets=budgets)

    def held(self) -> list[int]:
        return [held.micros for held in self.budget.entries() if not held.is_spent]

    def taken(self) -> int:
        return sum(held.micros for held in self.budget.entries())


@pytest.fixture
def world(tmp_path: Path) -> Mandated:
    return Mandated(Home(tmp_path))


def test_fifty_kills_before_a_create_give_all_money_back(world: Mandated) -> None:
    """Fifty processes die by SIGKILL after reserving money. After RESERVED_S all of it must be free again."""
    for number in range(50):
        child = os.fork()
        if child == 0:
            with budgets_of(world.home, world.clock, world.mandate.id).reserved(f"f-{number}", usd("0.01")):
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert world.taken() == usd("0.5")
    world.clock.sleep(RESERVED_S + 1)
    assert world.taken() == 0


@pytest.mark.parametrize("moment", ["before the hold", "after the hold"])
def test_killed_before_its_create_it_settles_what_was_paid(
    world: Mandated, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = MandateBudget.hold

    def killed(budget: MandateBudget, *arguments: object) -> bool:
        if moment == "after the hold":
            hold(budget, *arguments)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(MandateBudget, "hold", killed)
        assert world.drive() == "killed"
    assert len(world.held()) == (moment == "after the hold")
    assert world.drive() is ExitCode.DONE
    assert world.cloud.metered() <= world.taken() < world.plan.worst_micros
    assert world.held() == []


def test_a_create_without_an_answer_is_held_until_proven_gone(world: Mandated) -> None:
    worst = world.plan.worst_micros
    world.cloud.creates, world.cloud.killing = ["made, answer lost"], "after create"
    assert world.drive() == "killed"
    world.cloud.broken["find"] = Unknown("nobody answers")
    world.drive()
    world.clock.sleep(3 * 86_400)
    assert world.held() == [worst], "three days later, and nobody has seen its end"
    del world.cloud.broken["find"]
    world.drive()
    assert world.cloud.alive == []
    assert world.held() == []
    assert world.cloud.metered() <= world.taken()


def test_a_mandate_revoked_before_the_create_rents_nothing(world: Mandated) -> None:
    revoke_mandate(world.home, world.mandate.id)
    assert world.drive() is ExitCode.SETUP
    assert world.cloud.created == 0
    assert world.all_of(Event.CREATE_REFUSED)[0]["reason"] == "not_sent"


def test_one_revoked_while_its_run_trains_pays_for_it_to_its_end(world: Mandated) -> None:
    world.cloud.killing = "after create"
    assert world.drive() == "killed"
    revoke_mandate(world.home, world.mandate.id)
    assert world.drive() is ExitCode.DONE
    assert world.cloud.metered() <= world.taken() < world.plan.worst_micros
