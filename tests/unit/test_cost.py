"""Tests of a receipt's cost: never below the bill, close to it if the end was observed, and otherwise a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from tests.refusals import lacking
from tests.unit.cost import cost, dies
from tests.unit.ledger_samples import RATE, CloudRun


@pytest.fixture
def run(tmp_path: Path) -> CloudRun:
    return CloudRun(Home(tmp_path / "home").prepare())


LEASE_S = 5100 + 60


def opens(run: CloudRun, **changes: Any) -> CloudRun:
    event, data = run.opened()
    return run.write((event, {**data, "home": "0a1b2c"}), run.intended(), run.created(**changes))


def test_a_watched_machine_is_paid_to_the_first_read_of_its_end(run: CloudRun) -> None:
    opens(run).play(run.through_training())
    dies(run, alive_s_ago=5.0)
    costs = cost(run)
    assert (costs["rentals"][0]["billable_s"], costs["rentals"][0]["end_is"]) == (3337.0, "measured")
    assert (costs["is"], costs["billed_micros"], "watched" in costs["says"]) == ("measured", None, True)


@pytest.mark.parametrize("away_s", [14 * 60, 86_400])
def test_an_unwatched_machine_is_bounded_for_good_by_its_timer(run: CloudRun, away_s: int) -> None:
    opens(run)
    run.clock.sleep(5100 + 60 + away_s)
    dies(run)
    costs = cost(run)
    assert costs["upper_bound_micros"] == LEASE_S * RATE // 3600
    assert (costs["cap_kept"], "time limit" in costs["says"]) == (True, True)


def test_an_unseen_bound_over_the_cap_is_unknown_not_broken(run: CloudRun) -> None:
    run.cap = 3_000_000
    opens(run)
    run.clock.sleep(86_400)
    dies(run)
    costs = cost_without_plan(run)
    assert (costs["cap_kept"], costs["rentals"][0]["end_is"]) == (None, "its own timer")


def over_cap(run: CloudRun, *, up_s_ago: float) -> tuple[Any, ...]:
    """Settle a run that was read as gone a minute after its cap was used up.

    Return the receipt's `cap_kept`, the number of the audit's problems about the cap, and the number of its
    warnings.
    """
    run.cap = 3_000_000
    born_wall = run.clock.wall()
    opens(run)
    cap_s = 3600 * run.cap // RATE
    run.clock.sleep(cap_s + 60 - (run.clock.wall() - born_wall))
    dies(run, alive_s_ago=5.0, up_s_ago=up_s_ago)
    run.settle()
    costs, row = read_receipt(run.home, run.folder).predicate["cost"], audit(run.home).rows[0]
    assert (costs["is"], costs["upper_bound_micros"] > run.cap) == ("measured", True)
    broken = [problem for problem in row.problems if "kept" in problem]
    return costs["cap_kept"], len(broken), len(row.warnings)


def test_a_cap_is_broken_only_if_its_machine_was_seen_past_it(run: CloudRun) -> None:
    """A slow list may show the end late: a late reading alone does not prove that the cap was broken."""
    assert over_cap(run, up_s_ago=130.0) == (None, 0, 1)


def test_a_machine_seen_running_past_its_cap_has_broken_it(run: CloudRun) -> None:
    assert over_cap(run, up_s_ago=5.0) == (False, 1, 0)


def cost_without_plan(run: CloudRun) -> dict[str, Any]:
    run.settle()
    assert not [problem for problem in audit(run.home).rows[0].problems if "kept" in problem]
    return dict(read_receipt(run.home, run.folder).predicate["cost"])


def test_a_timer_that_was_seen_to_fail_bounds_nothing(run: CloudRun) -> None:
    opens(run)
    run.clock.sleep(10_000)
    dies(run, alive_s_ago=3.0)
    run.settle()
    rental = read_receipt(run.home, run.folder).predicate["cost"]["rentals"][0]
    assert (rental["billable_s"], rental["end_is"]) == (10_002.0, "measured")


def test_the_providers_own_times_count_where_nobody_looked(run: CloudRun) -> None:
    born = run.clock.wall() + 1
    opens(run, created_wall=born)
    run.clock.sleep(20_000)
    dies(run, ended_wall=born + 1000)
    rental = cost(run)["rentals"][0]
    assert (rental["billable_s"], rental["end_is"]) == (1002.0, "provider-reported")


def test_provider_times_that_contradict_sight_are_not_believed(run: CloudRun) -> None:
    born = run.clock.wall()
    opens(run, created_wall=born).play(run.through_training())
    dies(run, alive_s_ago=1.0, ended_wall=born + 60)
    assert cost(run)["rentals"][0]["end_is"] == "measured"


def test_a_second_machine_is_paid_and_red_from_request_to_end(run: CloudRun) -> None:
    opens(run)
    second = {"id": "pod-x", "token": run.token, "message": "a second machine"}
    run.write((Event.INCIDENT, {"code": "create.duplicate", **second}))
    assert audit(run.home).rows[0].may_be_billing
    run.clock.sleep(120)
    run.write((Event.INCIDENT, {"code": "create.duplicate_gone", **second}))
    run.play(run.through_training())
    dies(run, alive_s_ago=5.0)
    rental = cost(run)["rentals"][0]
    gone = {"id": "pod-x", "billable_s": 120.0, "micros": 2 * 60 * RATE // 3600, "ended": True}
    assert (rental["machines"], rental["extras"]) == (1, [gone])
    assert rental["micros"] == (58 + 2) * 60 * RATE // 3600


def test_the_proof_that_the_token_has_nothing_ends_a_second_too(run: CloudRun) -> None:
    opens(run)
    run.write((Event.INCIDENT, {"code": "create.duplicate", "id": "x", "token": run.token, "message": "a second"}))
    run.play(run.through_training())
    dies(run, alive_s_ago=5.0)
    assert not audit(run.home).rows[0].may_be_billing
    assert cost_without_plan(run)["rentals"][0]["extras"][0]["billable_s"] == 3367.0


def test_a_risen_price_counts_from_the_last_read_of_the_old_one(run: CloudRun) -> None:
    opens(run)
    run.clock.sleep(1200)
    rose = {"rate_micros_per_hour": 2 * RATE, "since_wall": run.clock.wall() - 600, "id": run.instance_id}
    run.write((Event.INCIDENT, {"code": "price.rose", "message": "dearer", "token": run.token, **rose}))
    run.clock.sleep(598)
    dies(run, alive_s_ago=5.0)
    rental = cost(run)["rentals"][0]
    assert rental["price_rose"] == [{"rate_micros_per_hour": 2 * RATE, "billable_s": 1200.0}]
    assert rental["micros"] == (1800 + 1200) * RATE // 3600


# The first reading that shows GONE ------------------------------------------------------------------------------------


def shown_gone(run: CloudRun, ago_s: float) -> None:
    fields = {"id": run.instance_id, "message": "it is shown as gone", "gone_s_ago": ago_s}
    run.write((Event.INCIDENT, {"code": "machine.gone", **fields}))


def test_a_machine_shown_gone_is_paid_to_the_first_such_read(run: CloudRun) -> None:
    """A machine that ended right after its launch must not be charged for the time in which gpurun waited for it."""
    opens(run)
    run.clock.sleep(900)
    shown_gone(run, 890.0)
    dies(run)
    rental = cost(run)["rentals"][0]
    assert (rental["billable_s"], rental["end_is"]) == (10.0, "measured")


@pytest.mark.parametrize("code", ["machine.back", "death.denied"])
def test_one_that_showed_itself_again_was_not_gone(run: CloudRun, code: str) -> None:
    opens(run)
    run.clock.sleep(900)
    shown_gone(run, 890.0)
    run.clock.sleep(30)
    run.write((Event.INCIDENT, {"code": code, "id": run.instance_id, "message": "it lives"}))
    dies(run)
    assert cost(run)["rentals"][0]["billable_s"] == 932.0


def test_readings_with_two_minutes_between_them_are_no_row(run: CloudRun) -> None:
    """The gap between two readings was not observed, and the first may have been wrong: the end counts as unseen."""
    opens(run)
    run.clock.sleep(100)
    shown_gone(run, 90.0)
    run.clock.sleep(3000)
    dies(run)
    rental = cost(run)["rentals"][0]
    assert (rental["billable_s"], rental["end_is"]) == (3102.0, "unseen")


def test_a_later_end_by_the_provider_makes_the_row_a_denial(run: CloudRun) -> None:
    """Readings showed no machine, but the provider later reports that it lived for 70 s, which must be paid for."""
    born = run.clock.wall()
    opens(run, created_wall=born)
    run.clock.sleep(100)
    shown_gone(run, 98.0)
    run.clock.sleep(15)
    dies(run, ended_wall=born + 70)
    rental = cost(run)["rentals"][0]
    assert (rental["billable_s"], rental["end_is"]) == (72.0, "provider-reported")


def test_a_shown_ending_does_not_contradict_the_providers_end(run: CloudRun) -> None:
    """EC2 stops billing at the request, but shows the instance as shutting down for a minute: AWS's end counts."""
    born = run.clock.wall()
    opens(run, created_wall=born).play(run.through_training())
    run.clock.sleep(100)
    dies(run, alive_s_ago=5.0, up_s_ago=70.0, ended_wall=run.clock.wall() - 60)
    rental = cost(run)["rentals"][0]
    assert (rental["billable_s"], rental["end_is"]) == (3335.0 + 100 - 60 + 2, "provider-reported")


# Egress ---------------------------------------------------------------------------------------------------------------


def charged(run: CloudRun) -> int:
    """Return what the receipt charges besides the billed minutes, in micro-dollars."""
    dies(run, alive_s_ago=5.0)
    (rental,) = cost(run)["rentals"]
    assert rental["machines"] == 1
    minutes = -(-rental["billable_s"] // 60)
    return int(rental["micros"] - minutes * 60 * RATE // 3600)


def with_terms(run: CloudRun, **more: Any) -> CloudRun:
    (event, opened), (intent, planned) = run.opened(), run.intended()
    terms = {**planned, "egress_micros": 500_000, "worst_micros": 11_730_000, **more}
    return run.write((event, {**opened, "home": "0a1b2c"}), (intent, terms), run.created())


def collected(run: CloudRun, micros: int) -> None:
    for seconds, (event, data) in run.through_training():
        run.clock.sleep(seconds)
        run.write((event, {**data, "egress_micros": micros} if event is Event.COLLECT_OBSERVED else data))


def test_nothing_left_a_machine_that_never_answered(run: CloudRun) -> None:
    assert charged(with_terms(run)) == 0


def test_uncounted_egress_of_one_that_answered_is_as_planned(run: CloudRun) -> None:
    with_terms(run)
    ready = next(note for _, note in run.through_training() if note[0] is Event.READY_OBSERVED)
    run.write(ready)
    assert charged(run) == 500_000


@pytest.mark.parametrize(("by_itself", "expected"), [(False, 900), (True, 500_000)])
def test_counted_egress_is_charged_self_senders_at_least_planned(run: CloudRun, by_itself: bool, expected: int) -> None:
    collected(with_terms(run, sends_itself=by_itself), 900)
    assert charged(run) == expected


# The bill -------------------------------------------------------------------------------------------------------------


def billed(run: CloudRun, micros: int) -> None:
    bill = {"token": run.token, "id": run.instance_id, "micros": micros, "reads": 2, "spread_s": 600.0}
    run.write((Event.BILL_OBSERVED, bill))


def test_an_unseen_end_is_bounded_by_the_bill_and_says_so(run: CloudRun) -> None:
    opens(run)
    run.clock.sleep(4000)
    dies(run)
    billed(run, RATE // 4)
    costs = cost(run)
    assert (costs["rentals"][0]["end_is"], costs["is"]) == ("the provider's bill", "billed")
    assert (costs["billed_micros"], costs["billed_is"]) == (RATE // 4, "provider-reported")
    assert RATE // 4 <= costs["upper_bound_micros"] <= RATE // 4 + RATE // 60
    assert lacking(costs["says"], "bill", "read twice") == []


def test_a_bill_shorter_than_the_machine_was_seen_is_not_whole(run: CloudRun) -> None:
    opens(run).play(run.through_training())
    run.clock.sleep(1000)
    dies(run)
    billed(run, RATE // 4)
    costs = cost(run)
    assert (costs["rentals"][0]["end_is"], costs["is"]) == ("unseen", "bound")


def test_a_bill_that_was_not_read_twice_is_a_problem(run: CloudRun) -> None:
    opens(run)
    run.clock.sleep(4000)
    dies(run)
    run.write((Event.BILL_OBSERVED, {"token": run.token, "id": "x", "micros": 1, "reads": 1, "spread_s": 0.0}))
    run.settle()
    assert "bill" in str(audit(run.home).rows[0].problems)
