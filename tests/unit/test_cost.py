"""What a rental is said to have cost: never less than the bill, little more where it was watched, else a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import digest_of
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from tests.unit.ledger_samples import RATE, CloudRun

LEASE_S = 5100 + 60


@pytest.fixture
def run(tmp_path: Path) -> CloudRun:
    return CloudRun(Home(tmp_path / "home").prepare())


def dies(
    run: CloudRun,
    *,
    alive_s_ago: float | None = None,
    ended_wall: float | None = None,
    first_s: int = 2,
    ran_s: float | None = None,
) -> None:
    """The request to end, and readings 15 s apart; `alive_s_ago` None: it was gone before anybody asked."""
    intent = {"id": run.instance_id, "token": run.token, "reason": "lease", "timer": True}
    run.write((Event.DESTROY_INTENDED, intent))
    run.write((Event.DESTROY_ASKED, {"id": run.instance_id, "attempt": 1, "answer": "asked"}))
    taken = [[place * 15.0, "GONE", False, digest_of(place)] for place in range(3)]
    for at_s, state, listed, answer in taken:
        run.clock.sleep(15 if at_s else first_s)
        seen = {"id": run.instance_id, "at_s": at_s, "state": state, "listed": listed, "answer_sha256": answer}
        ago_s = None if alive_s_ago is None else alive_s_ago + at_s
        seen |= {"ended_wall": ended_wall, "ran_s": ran_s, "alive_s_ago": ago_s, "found_gone": alive_s_ago is None}
        run.write((Event.DEATH_READ, seen))
    claim = {"id": run.instance_id, "teardown": "destroyed", "reads": 3, "spread_s": 30.0}
    run.write((Event.DEATH_PROVEN, {**claim, "evidence_sha256": digest_of(taken)}))


def opens(run: CloudRun, **told: Any) -> CloudRun:
    event, data = run.opened()
    return run.write((event, {**data, "home": "0a1b2c"}), run.intended(), run.created(**told))


def cost(run: CloudRun) -> dict[str, Any]:
    """The costs of the receipt, which an audit by independent code finds nothing wrong with."""
    run.settle()
    row = audit(run.home).rows[0]
    told = read_receipt(run.home, run.folder).predicate
    assert (row.problems, row.measured_micros) == ((), told["cost"]["upper_bound_micros"])
    assert round(sum(told["runtime"]["phases_s"].values()), 3) == told["runtime"]["billable_s"]
    return dict(told["cost"])


def test_a_machine_that_was_watched_is_paid_to_the_first_reading_that_shows_it_gone(run: CloudRun) -> None:
    opens(run).play(run.through_training())
    dies(run, alive_s_ago=5.0)
    told = cost(run)
    assert (told["rentals"][0]["billable_s"], told["rentals"][0]["end_is"]) == (3337.0, "measured")
    assert "says" not in told


@pytest.mark.parametrize("away_s", [14 * 60, 86_400])
def test_where_nobody_looked_its_own_timer_bounds_it_and_the_figure_does_not_grow(run: CloudRun, away_s: int) -> None:
    opens(run)
    run.clock.sleep(5100 + 60 + away_s)
    dies(run)
    told = cost(run)
    assert told["upper_bound_micros"] == LEASE_S * RATE // 3600
    assert (told["cap_kept"], told["says"]) == (True, "at most, by its own timer; when it ended was not seen")


def test_a_bound_over_the_cap_that_nobody_saw_is_unknown_and_not_broken(run: CloudRun) -> None:
    run.cap = 3_000_000
    opens(run)
    run.clock.sleep(86_400)
    dies(run)
    told = cost_without_plan(run)
    assert (told["cap_kept"], told["rentals"][0]["end_is"]) == (None, "its own timer")


def cost_without_plan(run: CloudRun) -> dict[str, Any]:
    run.settle()
    problems = audit(run.home).rows[0].problems
    assert "the cap was not kept" not in problems
    return dict(read_receipt(run.home, run.folder).predicate["cost"])


def test_a_timer_that_was_seen_to_fail_bounds_nothing(run: CloudRun) -> None:
    opens(run)
    run.clock.sleep(10_000)
    dies(run, alive_s_ago=3.0)
    run.settle()
    told = read_receipt(run.home, run.folder).predicate["cost"]["rentals"][0]
    assert (told["billable_s"], told["end_is"]) == (10_002.0, "measured")


def test_the_providers_own_times_count_where_nobody_looked(run: CloudRun) -> None:
    born = run.clock.wall() + 1
    opens(run, created_wall=born)
    run.clock.sleep(20_000)
    dies(run, ended_wall=born + 1000)
    told = cost(run)["rentals"][0]
    assert (told["billable_s"], told["end_is"]) == (1002.0, "provider-reported")


def test_times_of_the_provider_that_contradict_what_was_seen_are_not_believed(run: CloudRun) -> None:
    born = run.clock.wall()
    opens(run, created_wall=born).play(run.through_training())
    dies(run, alive_s_ago=1.0, ended_wall=born + 60)
    assert cost(run)["rentals"][0]["end_is"] == "measured"


def test_a_second_machine_is_paid_from_its_request_to_its_own_end_and_red_until_then(run: CloudRun) -> None:
    opens(run)
    second = {"id": "pod-x", "token": run.token, "message": "a second machine"}
    run.write((Event.INCIDENT, {"code": "create.duplicate", **second}))
    assert audit(run.home).rows[0].may_be_billing
    run.clock.sleep(120)
    run.write((Event.INCIDENT, {"code": "create.duplicate_gone", **second}))
    run.play(run.through_training())
    dies(run, alive_s_ago=5.0)
    told = cost(run)["rentals"][0]
    gone = {"id": "pod-x", "billable_s": 120.0, "micros": 2 * 60 * RATE // 3600, "ended": True}
    assert (told["machines"], told["extras"]) == (1, [gone])
    assert told["micros"] == (58 + 2) * 60 * RATE // 3600


def test_the_proof_that_nothing_has_the_token_ends_a_second_machine_too(run: CloudRun) -> None:
    opens(run)
    run.write((Event.INCIDENT, {"code": "create.duplicate", "id": "x", "token": run.token, "message": "a second"}))
    run.play(run.through_training())
    dies(run, alive_s_ago=5.0)
    assert not audit(run.home).rows[0].may_be_billing
    assert cost_without_plan(run)["rentals"][0]["extras"][0]["billable_s"] == 3367.0


def test_a_price_that_rose_counts_from_when_the_old_one_was_read_last(run: CloudRun) -> None:
    opens(run)
    run.clock.sleep(1200)
    rose = {"rate_micros_per_hour": 2 * RATE, "since_wall": run.clock.wall() - 600, "id": run.instance_id}
    run.write((Event.INCIDENT, {"code": "price.rose", "message": "dearer", "token": run.token, **rose}))
    run.clock.sleep(598)
    dies(run, alive_s_ago=5.0)
    told = cost(run)["rentals"][0]
    assert told["price_rose"] == [{"rate_micros_per_hour": 2 * RATE, "billable_s": 1200.0}]
    assert told["micros"] == (1800 + 1200) * RATE // 3600
