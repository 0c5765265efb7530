"""Tests of scenarios that the simulation once found: each lost money or made gpurun state an untruth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.ledger.write_receipt import read_receipt
from tests.emulators.fake import Fault
from tests.simulation.checker import check
from tests.simulation.generator import draw
from tests.simulation.play import Played, play
from tests.simulation.scenario import Deed, Scenario, Strike, Weather
from tests.simulation.soak import folder_of_one_run, judge

# The sixth point follows the record of the first create, when the hostile cloud still hides the new machine.
FOUND = {
    "what was just born and is not to be seen yet is not dead": Scenario(0, ("hostile",), deeds=(Deed(6, "destroy"),)),
    "what was asked for after hours of sleep was born when it was asked for, not when that was intended": Scenario(
        0, ("hostile",), deeds=(Deed(4, "sleep", 14400.0),)
    ),
    "what was made while nobody could look, and ended itself, was not free, and its cap is spent": Scenario(
        0, ("aws",), strikes=(Strike("create", 1, Fault.LOST),), weather=(Weather("silent", 30.3, 800.0),)
    ),
    "the same, when the laptop was off": Scenario(0, ("aws",), deeds=(Deed(7, "kill", 1800.0),)),
    "the same, when the laptop slept on a kernel that does not count it": Scenario(
        0, ("hostile",), strikes=(Strike("create", 1, Fault.LOST),), deeds=(Deed(14, "doze", 1800.0),)
    ),
    "one empty list is not the end of what was left beside a machine": Scenario(
        0, ("aws",), strikes=(Strike("leftovers", 1, Fault.DENIED),)
    ),
    "a plan whose second offer is dearer still has sound books": Scenario(0, ("runpod", "aws")),
    "a run that was told to drop its files while they came home is no success": Scenario(
        0, ("lambda-guarded",), train_s=5.0, deeds=(Deed(90, "destroy"),)
    ),
    "a laptop that sleeps through the looking for what was left has not seen three empty lists": Scenario(
        0,
        ("hostile",),
        strikes=(
            Strike("find", 1, Fault.BROKEN),
            Strike("leftovers", 1, Fault.DENIED),
            Strike("create", 1, Fault.FULL),
        ),
        deeds=(Deed(15, "sleep", 300.0),),
    ),
    "two machines of one order that are found at its end are both on the receipt": Scenario(
        0, ("lambda-guarded",), strikes=(Strike("create", 1, Fault.TWICE),), deeds=(Deed(7, "kill", 1800.0),)
    ),
    "a laptop that is ahead and dies has not bought its machine the minutes by which it was ahead": Scenario(
        0, ("hostile",), train_s=1e6, deeds=(Deed(4, "jump", 90.0), Deed(45, "kill", 1800.0))
    ),
    "a timer whose provider refuses it at the deadline has not kept the cap": Scenario(
        0,
        ("runpod",),
        train_s=1e6,
        deeds=(Deed(60, "kill", 1800.0),),
        weather=(Weather("ends refused", 600.0, 1500.0),),
    ),
    "a list that takes most of a minute keeps no machine alive and proves no death early": Scenario(
        0, ("aws",), train_s=1e6, deeds=(Deed(60, "destroy"),), list_s=40.0
    ),
    "a machine that ended as it was launched costs what it cost, and the next offer is taken": Scenario(
        0, ("aws", "runpod"), strikes=(Strike("create", 1, Fault.STILLBORN),), machines=2
    ),
    "an id that never was costs no more than the wait for it": Scenario(
        0, ("runpod", "aws"), strikes=(Strike("create", 1, Fault.NOWHERE),), machines=2
    ),
    "two answers that say gone, half an hour apart, are no row, and that time was not free": Scenario(
        9, ("hostile",), deeds=(Deed(21, "sleep", 1800.0),)
    ),
    "an answer that was slept over before it was written down came when it came": Scenario(
        0, ("lambda-guarded",), deeds=(Deed(43, "sleep", 1800.0),), list_s=40.0
    ),
    "a clock that was set has not broken the cap": draw(20989),
    "a list that lags shows nothing alive that is read as gone": draw(20919),
    "a timer that root of the machine killed has not kept the cap": Scenario(
        0, ("runpod",), train_s=1e6, deeds=(Deed(50, "guard killed"), Deed(60, "kill")), ending="reaped elsewhere"
    ),
}


@pytest.mark.parametrize("scenario", FOUND.values(), ids=list(FOUND))
def test_what_was_found_once_holds_now(scenario: Scenario) -> None:
    verdict = judge(scenario)
    assert verdict.breaches == (), verdict.story


@pytest.mark.parametrize("profile", ["runpod", "aws", "lambda-guarded", "hostile"])
def test_a_machine_denied_for_38_s_is_not_signed_as_gone(profile: str, tmp_path: Path) -> None:
    ends = next(at_s for at_s, place in clean(profile).points if place == "after destroy.intended")
    scenario = Scenario(0, (profile,), train_s=90.0, weather=(Weather("denied", ends, ends + 38.0),))
    played = play(scenario, tmp_path)
    assert check(played) == []
    assert [incident["code"] for incident in incidents(played)] == ["death.denied", "machine.back"]
    assert played.outcomes[-1].exit_code == 0


def test_a_cap_between_last_sight_and_first_absence_may_be_kept(tmp_path: Path) -> None:
    """The machine died at 649 s; a slow list and a hanging request delayed the first reading of GONE to 760 s."""
    played = play(draw(20450), tmp_path)
    cost = receipt_of(played)["cost"]
    assert check(played) == []
    assert (cost["cap_kept"], cost["upper_bound_micros"] > cost["cap_micros"]) == (None, True)
    assert played.outcomes[-1].exit_code == int(ExitCode.COLLECT_FAILED), "whatever became of the cap"


def receipt_of(played: Played) -> dict[str, Any]:
    return dict(read_receipt(played.home, played.folder).predicate)


def incidents(played: Played) -> list[dict[str, Any]]:
    return [record.data for record in played.records if record.event is Event.INCIDENT]


@pytest.mark.parametrize("profile", ["runpod", "aws"])
@pytest.mark.parametrize("fault", [Fault.STILLBORN, Fault.NOWHERE])
def test_a_machine_gone_at_launch_is_followed_by_the_next_offer(profile: str, fault: Fault, tmp_path: Path) -> None:
    others = {"runpod": "aws", "aws": "runpod"}
    scenario = Scenario(0, (profile, others[profile]), strikes=(Strike("create", 1, fault),), machines=2)
    played = play(scenario, tmp_path)
    assert check(played) == []
    assert [incident["code"] for incident in incidents(played)] == ["machine.gone", "boot.gone"]
    assert played.outcomes[-1].words == "DONE"


@pytest.mark.parametrize("point", range(1, 30))
def test_destroyed_right_after_it_was_born_it_is_really_dead(point: int) -> None:
    verdict = judge(Scenario(0, ("hostile",), deeds=(Deed(point, "destroy"),)))
    assert verdict.breaches == (), verdict.story


def clean(profile: str) -> Played:
    """Return an undisturbed run, whose points and calls a test can count."""
    with folder_of_one_run() as folder:
        return play(Scenario(0, (profile,), train_s=90.0), Path(folder))


def test_a_laptop_asleep_between_two_death_reads_takes_the_third() -> None:
    passed = [place for _, place in clean("runpod").points]
    asleep = Deed(passed.index("after death.read") + 1, "sleep", 60.0)
    verdict = judge(Scenario(0, ("runpod",), train_s=90.0, deeds=(asleep,)))
    assert verdict.breaches == (), verdict.story


def test_a_machine_denied_twice_and_back_is_ended_at_once() -> None:
    verbs = [verb for _, verb, _ in clean("runpod").clouds["runpod"].history]
    before = verbs[: verbs.index("destroy")]
    lies = [Strike(v, before.count(v) + n, Fault.DENIED) for v in ("find", "read") for n in (1, 2)]
    verdict = judge(Scenario(0, ("runpod",), train_s=90.0, strikes=(Strike("destroy", 1, Fault.DEAF), *lies)))
    assert verdict.breaches == (), verdict.story
    assert verdict.ends == ("DONE",), "in one go, not when somebody calls again"
