"""Tests that a supervisor can be killed at every kind of record and call, with every provider, and keeps its promises.

A point that is passed many times (a poll, a look) is tried at its first and its last passing. The cap pays for two
machines, so that a create with an unknown outcome does not prevent a second one. With a cap for one, nothing is
trained.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulators.fake import PROFILES, Fault
from tests.simulation.play import play
from tests.simulation.scenario import Deed, Scenario, Strike
from tests.simulation.soak import folder_of_one_run, judge

TROUBLES: dict[str, tuple[Strike, ...]] = {
    "clean": (),
    "answer lost": (Strike("create", 1, Fault.LOST),),
    "no capacity, next offer": (Strike("create", 1, Fault.FULL),),
    "a dev box": (),
}


DEV_BOX = "a dev box"


def scenario(profile: str, trouble: str, *deeds: Deed) -> Scenario:
    """Return a scenario with two offers of the profile, one trouble, and a job that takes a second."""
    drawn = Scenario(0, (profile, profile), train_s=1.0, strikes=TROUBLES[trouble], deeds=deeds, machines=2)
    return replace(drawn, job="dev_box" if trouble == DEV_BOX else "trainer")


def points_of(profile: str, trouble: str) -> list[tuple[int, str]]:
    """Return the points of an undisturbed run at which to kill it, by number and name: each name's first and last."""
    with folder_of_one_run() as folder:
        passed = [place for _, place in play(scenario(profile, trouble), Path(folder)).points]
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, place in enumerate(passed, start=1):
        numbers[place].append(number)
    return sorted((number, place) for place, all_of in numbers.items() for number in {all_of[0], all_of[-1]})


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("profile", PROFILES)
def test_killed_anywhere_and_resumed_every_promise_is_kept(profile: str, trouble: str) -> None:
    points = points_of(profile, trouble)
    names = {place for _, place in points}
    assert {
        "before create",
        "after create",
        "after create.intended",
        "before death.proven",
        "after run.closed",
    } <= names
    for number, place in points:
        verdict = judge(scenario(profile, trouble, Deed(number, "kill")))
        assert not verdict.breaches, f"killed {place} (point {number}): {verdict.breaches}\n{verdict.story}"
        assert verdict.ends[0] == "killed"
        assert verdict.ends[1:] in ((), ("DONE",)), f"killed {place} (point {number}) it ends with {verdict.ends}"
        assert verdict.ends[1:] or place == "after run.closed"


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_killed_before_the_answer_a_cap_for_one_never_pays_two(profile: str) -> None:
    points = [
        number for number, place in points_of(profile, "clean") if place in {"after create.intended", "before create"}
    ]
    assert points
    for number in points:
        verdict = judge(replace(scenario(profile, "clean", Deed(number, "kill")), machines=1))
        assert (verdict.breaches, verdict.ends) == ((), ("killed", "NO_OFFER")), verdict.story


SAVED = "after far.get checkpoints/000010.state.json"
VOYAGERS = ("runpod", "lambda-guarded", "aws", "hostile")


def voyage(profile: str, *deeds: Deed) -> Scenario:
    """Return a run that may continue on other machines; its cap also covers a machine that may exist unseen."""
    return Scenario(0, (profile,), train_s=120.0, machines=9, legs=5, deeds=deeds)


def places_of(scenario: Scenario) -> list[str]:
    """Return the names of the points of a run, in their order."""
    with folder_of_one_run() as folder:
        return [place for _, place in play(scenario, Path(folder)).points]


def points_between_legs(profile: str) -> tuple[Deed, list[tuple[int, str]]]:
    """Return the loss of a machine that has saved a checkpoint, and the points from there to the next training.

    As in `points_of`, these are the first and the last passing of each kind of point.
    """
    taken = Deed(places_of(voyage(profile)).index(SAVED) + 4, "taken")
    places = places_of(voyage(profile, taken))
    last = max(place for place, name in enumerate(places) if name == "after train.started") + 1
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, place in enumerate(places[taken.at : last], start=taken.at + 1):
        numbers[place].append(number)
    return taken, sorted((number, place) for place, all_of in numbers.items() for number in {all_of[0], all_of[-1]})


@pytest.mark.slow
@pytest.mark.parametrize("profile", VOYAGERS)
def test_a_run_killed_between_two_machines_is_resumed_as_one_run(profile: str) -> None:
    taken, points = points_between_legs(profile)
    names = {place for _, place in points}
    assert {"after death.proven", "after leg.planned", "after create.intended", "before create"} <= names
    for number, place in points:
        verdict = judge(voyage(profile, taken, Deed(number, "kill")))
        assert not verdict.breaches, f"killed {place} (point {number}): {verdict.breaches}\n{verdict.story}"
        assert verdict.ends == ("killed", "DONE"), f"killed {place} (point {number}) it ends with {verdict.ends}"
