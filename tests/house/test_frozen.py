"""Tests of exit codes and event names, on which scripts and journals rely: a change here changes the contract."""

from __future__ import annotations

from gpurun.core import errors
from gpurun.core.journal_records import Event

EXIT_CODES = {
    "DONE": 0, "BUG": 1, "USAGE": 2, "DECLINED": 3, "SETUP": 4, "NO_OFFER": 5, "TRAINING_FAILED": 6, "BUDGET_STOP": 7,
    "PENDING": 8, "MAY_BE_BILLING": 9, "VERIFICATION_FAILED": 10, "COLLECT_FAILED": 11, "RUN_HELD": 12,
    "INTERRUPTED": 130, "TERMINATED": 143,
}  # fmt: skip
EVENTS = """
    run.opened stage.intended stage.observed create.intended create.observed create.refused create.unknown
    ready.observed ship.intended ship.observed train.intended train.started rate.observed train.observed stop.requested
    collect.intended collect.observed hold.intended hold.observed
    destroy.intended destroy.asked death.read death.proven bill.observed salvage.intended
    salvage.observed step.failed incident leg.planned receipt.observed run.closed journal.repaired
"""


def test_exit_codes() -> None:
    assert {code.name: code.value for code in errors.ExitCode} == EXIT_CODES


def test_event_names() -> None:
    assert [str(event) for event in Event] == EVENTS.split()
