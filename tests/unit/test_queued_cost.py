"""Tests of the cost of a job that had to queue: its time in the queue is free, its running time never is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from tests.unit.cost import cost, dies
from tests.unit.ledger_samples import RATE, CloudRun

WAIT_S, LEASE_S = 40_000, 5100 + 60


@pytest.fixture
def run(tmp_path: Path) -> CloudRun:
    """Return a run whose job was submitted and is waiting in the queue."""
    run = CloudRun(Home(tmp_path / "home").prepare())
    (event, opened), (asked, intent) = run.opened(), run.intended()
    lease = {**intent["lease"], "queue_s": 86_400}
    intent |= {"lease": lease, "deadline_wall": intent["deadline_wall"] + 86_400, "billing_unit_s": 1}
    run.write((event, {**opened, "home": "0a1b2c"}), (asked, intent), run.created(state="PENDING"))
    run.clock.sleep(WAIT_S)
    return run


def ready(run: CloudRun, started_wall: float) -> None:
    fields = {"id": run.instance_id, "instance": run.instance(started_wall=started_wall), "facts": {}, "seconds": 5.0}
    run.write((Event.READY_OBSERVED, fields))


def ends(run: CloudRun, ran_s: float | None, alive_s_ago: float | None = None) -> tuple[float, str, Any]:
    """Observe the job's end; return the billable seconds, the kind of evidence for it, and whether the cap was kept."""
    dies(run, alive_s_ago=alive_s_ago, ran_s=ran_s)
    costs = cost(run)
    (rental,) = costs["rentals"]
    assert costs["upper_bound_micros"] == -(-RATE * int(-(-rental["billable_s"] // 1)) // 3600)
    assert costs["gpu_hours"] == round(rental["billable_s"] / 3600, 4)
    return rental["billable_s"], rental["end_is"], costs["cap_kept"]


def test_the_queue_is_free_and_the_rest_counts_from_the_start(run: CloudRun) -> None:
    started_wall = run.clock.wall()
    run.clock.sleep(7)
    ready(run, started_wall)
    run.clock.sleep(1000)
    assert ends(run, None, alive_s_ago=2.0) == (7 + 1000 + 2 + 2, "measured", True)


def test_of_several_starts_that_are_told_the_earliest_counts(run: CloudRun) -> None:
    started_wall = run.clock.wall()
    ready(run, started_wall)
    run.clock.sleep(600)
    run.write((Event.CREATE_OBSERVED, {**run.created(started_wall=run.clock.wall())[1], "adopted": True}))
    run.clock.sleep(400)
    assert ends(run, 400.0, alive_s_ago=2.0)[:2] == (1000 + 2 + 2, "measured")


def test_a_job_that_never_began_costs_nothing(run: CloudRun) -> None:
    assert audit(run.home).rows[0].measured_micros == 0
    assert ends(run, 0.0, alive_s_ago=2.0) == (0.0, "provider-reported", True)


def test_an_unseen_job_costs_what_slurm_says_or_its_time_limit(run: CloudRun) -> None:
    assert ends(run, None) == (LEASE_S, "its own timer", True)


def test_an_unseen_job_cancelled_twice_costs_its_time_limit(run: CloudRun) -> None:
    """A job that was never seen to run costs at most its time limit, even if it was cancelled twice."""
    run.write((Event.DESTROY_INTENDED, {"id": run.instance_id, "token": run.token, "reason": "lease", "timer": True}))
    assert ends(run, None) == (LEASE_S, "its own timer", True)


def test_slurms_word_of_a_job_that_nobody_saw_counts(run: CloudRun) -> None:
    assert ends(run, 900.0) == (902.0, "provider-reported", True)


def test_what_is_read_in_its_folder_is_no_sign_of_a_jobs_life(run: CloudRun) -> None:
    """A lost job's log may be read long after its end: that reading once made the receipt up to 75 % too high."""
    ready(run, run.clock.wall())
    run.clock.sleep(9000)
    notes = dict(note for _, note in run.through_training())
    for event in (Event.SHIP_INTENDED, Event.SHIP_OBSERVED, Event.TRAIN_INTENDED, Event.TRAIN_STARTED,
                  Event.TRAIN_OBSERVED, Event.COLLECT_INTENDED, Event.COLLECT_OBSERVED):  # fmt: skip
        run.write((event, notes[event]))
    assert ends(run, 900.0) == (902.0, "provider-reported", True)


def test_a_word_that_is_less_than_what_was_seen_is_not_believed(run: CloudRun) -> None:
    ready(run, run.clock.wall())
    run.clock.sleep(1000)
    assert ends(run, 10.0, alive_s_ago=2.0)[:2] == (1004.0, "measured")


def test_a_job_of_a_sleeping_laptop_is_bounded_by_its_time_limit(run: CloudRun) -> None:
    ready(run, run.clock.wall())
    run.clock.sleep(90_000)
    assert ends(run, None) == (LEASE_S, "its own timer", True)
