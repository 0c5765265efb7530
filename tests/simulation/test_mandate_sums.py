"""Tests that a mandate bounds the cost of an agent's session, in a thousand sessions on simulated clouds."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gpurun.core.errors import NoOffer
from gpurun.core.money import total, usd
from gpurun.core.paths import Home
from gpurun.ledger.mandate import MandateBudget, budgets_of, write_mandate
from tests.simulation.checker import is_cap_excused
from tests.simulation.generator import draw
from tests.simulation.laptop import TrueClock
from tests.simulation.play import Stage

SESSIONS, GROUP, RUNS = 1000, 50, 4


def session(seed: int, root: Path) -> list[str]:
    """Return the broken bounds of a session that requests four runs, each with its own trouble."""
    home, clock, dice = Home(root / "home").prepare(), TrueClock(), Random(seed)
    most = usd(dice.choice((1, 2, 3)))
    terms = {"total_micros": most, "per_run_micros": most, "until_wall": clock.wall() + 1e9, "root": str(root)}
    mandate, _ = write_mandate(home, clock, **terms)
    budget, bills, is_excused = MandateBudget(home, clock, mandate.id), [], False
    for number in range(RUNS):
        stage = Stage(draw(RUNS * seed + number), root, f"fox-{number}", mandate.id)
        worst = stage.played.plan.most_micros
        try:
            with budgets_of(home, stage.laptop, mandate.id).reserved(f"fox-{number}", worst):
                pass
        except NoOffer:
            continue
        with stage.set_up():
            stage.drive_to_the_end()
        bills.append(total(*(cloud.metered() for cloud in stage.played.clouds.values())))
        is_excused = is_excused or is_cap_excused(stage.played)
    taken = total(*(held.micros for held in budget.entries()))
    if is_excused:  # No sum holds if a machine outlives its timer, its supervisor and the reaper.
        return []
    return [
        f"seed {seed}: {words}"
        for words, is_broken in (
            (f"the meters say {total(*bills)}, the mandate {most}", total(*bills) > most),
            (f"the meters say {total(*bills)}, and only {taken} are taken", total(*bills) > taken),
        )
        if is_broken
    ]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SESSIONS, GROUP))
def test_no_session_costs_more_than_its_mandate_has(first: int, tmp_path: Path) -> None:
    assert [words for seed in range(first, first + GROUP) for words in session(seed, tmp_path / str(seed))] == []


def test_a_session_is_refused_what_its_mandate_does_not_pay_for(tmp_path: Path) -> None:
    assert session(3, tmp_path) == []
    assert len(list((tmp_path / "home" / "runs").iterdir())) == RUNS, "each was planned"
    closed = [run for run in Home(tmp_path / "home").folders() if run.is_closed]
    assert len(closed) < RUNS
