"""Tests that every promise is kept in hundreds of random scenarios; `make full` plays thousands more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulators.fake import PROFILES, Fault
from tests.simulation.generator import FAULTS, draw
from tests.simulation.soak import judge, judge_seed, shrunk

SEEDS, SWEEPS, GROUP = 320, 1000, 20
_WEATHERS = ("silent", "ends refused", "revoked", "line down", "denied")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_whatever_goes_wrong_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + GROUP):
        verdict = judge_seed(seed)
        if verdict.breaches:
            small = shrunk(verdict)
            pytest.fail("\n".join([f"seed {seed}", *small.breaches, repr(small.scenario), small.story]))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SWEEPS, GROUP))
def test_a_sweep_keeps_every_promise_too(first: int) -> None:
    for seed in range(first, first + GROUP):
        verdict = judge(replace(draw(seed), job="sweep"))
        assert not verdict.breaches, (seed, verdict.breaches, verdict.story)


def test_a_seed_always_gives_the_same_story() -> None:
    assert draw(11) == draw(11)
    assert judge_seed(11).ends == judge_seed(11).ends


def test_the_scenarios_reach_every_profile_fault_and_deed() -> None:
    drawn = [draw(seed) for seed in range(2000)]
    assert {name for case in drawn for name in case.profiles} == set(PROFILES)
    assert {s.fault for case in drawn for s in case.strikes} == {fault for some in FAULTS.values() for fault in some}
    assert {fault for some in FAULTS.values() for fault in some} == set(Fault) - {Fault.NONE}
    assert {w.kind for case in drawn for w in case.weather} == {*_WEATHERS}
    assert {case.ending for case in drawn} == {"resumed", "never returns", "reaped elsewhere"}
