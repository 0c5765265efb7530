"""Tests that the checker reports each kind of breach: every test changes the history of a run by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.core.money import Micros, usd
from tests.emulators.fake import Box, Fault
from tests.simulation.checker import check
from tests.simulation.play import Played, play
from tests.simulation.scenario import Deed, Scenario, Strike


@pytest.fixture
def played(tmp_path: Path) -> Played:
    """Return a run without trouble."""
    return play(Scenario(0, ("runpod",)), tmp_path)


def the_box(played: Played) -> Box:
    (box,) = played.clouds["runpod"].boxes
    return box


def breaches(played: Played) -> set[str]:
    return {breach.partition(":")[0] for breach in check(played)}


def test_where_all_went_well_it_finds_nothing(played: Played) -> None:
    assert played.closed
    assert check(played) == []


def test_it_sees_a_machine_that_outlived_its_proof(played: Played) -> None:
    the_box(played).died_s = played.ended_s
    assert {"death_is_proven", "bounded_money"} <= breaches(played)


def test_it_sees_a_machine_that_lives_for_ever(played: Played) -> None:
    the_box(played).ends_s = the_box(played).died_s = None
    assert "timers_hold" in breaches(played)


def test_it_sees_a_create_without_an_intent(played: Played) -> None:
    played.points.insert(0, (0.0, "before create"))
    assert "intent_first" in breaches(played)


def test_it_sees_a_machine_that_nobody_asked_for(played: Played) -> None:
    box = the_box(played)
    box.order = box.order.model_copy(update={"token": "gr-fox-41-00000000"})
    assert "intent_first" in breaches(played)


def test_it_sees_a_second_machine_beside_the_first(played: Played) -> None:
    first = the_box(played)
    second = Box("i-2", first.order, first.rate, first.born_s, first.up_s, "A100", 1, died_s=first.died_s)
    played.clouds["runpod"].boxes.append(second)
    assert "find_second_machines" in breaches(played)


def test_it_sees_a_meter_over_receipt_and_cap(played: Played) -> None:
    the_box(played).rate = usd(100)
    found = [breach for breach in check(played) if breach.startswith("bounded_money")]
    assert len(found) == 3, "the receipt's bound, its word that the cap was kept, and the cap"


def test_it_sees_a_supervisor_that_goes_without_saying_9(tmp_path: Path) -> None:
    played = play(Scenario(0, ("runpod",), deeds=(Deed(30, "kill"),), ending="never returns"), tmp_path)
    assert "nothing_forgotten" not in breaches(played)
    killed = played.outcomes[0]
    played.outcomes[0] = replace(killed, words="DONE", exit_code=0)
    assert "nothing_forgotten" in breaches(played)


def test_it_sees_a_success_that_is_none(played: Played) -> None:
    next(played.folder.artifacts.rglob("*.safetensors")).unlink()
    assert "success_is_true" in breaches(played)


def test_it_sees_what_was_left_behind(tmp_path: Path) -> None:
    played = play(Scenario(0, ("aws",)), tmp_path)
    played.clouds["aws"].things[0].removed_s = None
    assert breaches(played) == {"side_resources_go"}


def test_it_sees_a_list_that_says_less_than_was_paid(played: Played) -> None:
    last = played.outcomes[-1]
    played.outcomes[-1] = replace(last, row=replace(last.row, spent_micros=Micros(0)))
    assert breaches(played) == {"sentences_hold"}


def test_it_sees_a_list_that_is_calm_while_a_machine_lives(tmp_path: Path) -> None:
    played = play(Scenario(0, ("runpod",), deeds=(Deed(30, "kill"),), ending="never returns"), tmp_path)
    killed = played.outcomes[0]
    assert "sentences_hold" not in breaches(played)
    played.outcomes[0] = replace(killed, row=replace(killed.row, may_be_billing=False))
    assert "sentences_hold" in breaches(played)


def test_it_sees_a_machine_that_lived_when_it_was_told_gone(tmp_path: Path) -> None:
    offers = ("runpod", "aws")
    played = play(Scenario(0, offers, strikes=(Strike("create", 1, Fault.NOWHERE),), machines=2), tmp_path)
    assert breaches(played) == set()
    played.clouds["aws"].boxes[0].born_s, played.clouds["aws"].boxes[0].id = 0.0, "i-runpod-none"
    assert "sentences_hold" in breaches(played)
