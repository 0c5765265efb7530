"""Helpers of test_cost.py and other tests: they end a machine at chosen times, and return an audited cost."""

from __future__ import annotations

from typing import Any

from gpurun.core.journal_records import Event
from gpurun.core.records import digest_json
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt
from tests.unit.ledger_samples import CloudRun


def dies(
    run: CloudRun,
    *,
    alive_s_ago: float | None = None,
    ended_wall: float | None = None,
    first_s: int = 2,
    ran_s: float | None = None,
    up_s_ago: float | None = None,
) -> None:
    """Write the request to end the machine, three readings 15 s apart that find it gone, and the proof of death.

    `first_s` is the time from the request to the first reading. Before that reading, the machine was last seen
    alive `alive_s_ago`, and last seen alive and not ending `up_s_ago`. If `alive_s_ago` is None, it was gone before
    the request.
    """
    intent = {"id": run.instance_id, "token": run.token, "reason": "lease", "timer": True}
    run.write((Event.DESTROY_INTENDED, intent))
    run.write((Event.DESTROY_ASKED, {"id": run.instance_id, "attempt": 1, "answer": "asked"}))
    taken = [[place * 15.0, "GONE", False, digest_json(place)] for place in range(3)]
    for at_s, state, listed, answer in taken:
        run.clock.sleep(15 if at_s else first_s)
        seen = {"id": run.instance_id, "at_s": at_s, "state": state, "listed": listed, "answer_sha256": answer}
        ago_s = None if alive_s_ago is None else alive_s_ago + at_s
        seen |= {"ended_wall": ended_wall, "ran_s": ran_s, "alive_s_ago": ago_s, "gone_s_ago": None}
        seen |= {"up_s_ago": ago_s if up_s_ago is None else up_s_ago + at_s}
        run.write((Event.DEATH_READ, seen))
    claim = {"id": run.instance_id, "teardown": "destroyed", "reads": 3, "spread_s": 30.0}
    run.write((Event.DEATH_PROVEN, {**claim, "evidence_sha256": digest_json(taken)}))


def cost(run: CloudRun) -> dict[str, Any]:
    """Settle the run and return its receipt's costs; assert that the audit computes the same and finds no problem."""
    run.settle()
    row = audit(run.home).rows[0]
    predicate = read_receipt(run.home, run.folder).predicate
    assert (row.problems, row.measured_micros) == ((), predicate["cost"]["upper_bound_micros"])
    assert round(sum(predicate["runtime"]["phases_s"].values()), 3) == predicate["runtime"]["billable_s"]
    return dict(predicate["cost"])
