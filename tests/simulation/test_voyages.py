"""Tests of runs that continue on other machines after a loss; `make full` plays thousands more."""

from __future__ import annotations

import pytest

from tests.simulation.generator import draw_voyage
from tests.simulation.soak import judge_voyage, shrunk, summary

SEEDS, GROUP = 120, 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_however_often_it_is_taken_away_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + GROUP):
        verdict = judge_voyage(seed)
        if verdict.breaches:
            small = shrunk(verdict)
            pytest.fail("\n".join([f"voyage {seed}", *small.breaches, repr(small.scenario), small.story]))


def test_voyages_move_finish_and_keep_every_promise() -> None:
    verdicts = [judge_voyage(seed) for seed in range(12)]
    assert [verdict.breaches for verdict in verdicts if verdict.breaches] == []
    totals = summary(verdicts)
    assert totals.finished > 0
    assert totals.machines > len(verdicts), "some were on more than one machine"
    assert totals.watched > 0
    assert 0 < totals.moved < totals.on_demand, "what moving costs is less than what spot saves"
    assert totals.kept > totals.again, "what was saved is not trained again"


def test_a_voyage_is_drawn_with_every_number_of_machines() -> None:
    drawn = [draw_voyage(seed) for seed in range(500)]
    assert {scenario.legs for scenario in drawn} == {2, 3, 5}
    assert any(scenario.has("taken") and scenario.has("kill") for scenario in drawn)
