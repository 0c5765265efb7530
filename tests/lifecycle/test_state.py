"""Tests of the state that follows from a journal's records, and of the step that comes next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Phase, RunState
from gpurun.ledger.run_state import Step, exit_code_of, next_step, replay_journal
from tests.whole_records import record

INSTANCE = {"id": "i-1", "provider": "local", "token": "gr-x-1", "run": "x", "state": "RUNNING"}
STORY: list[tuple[Event, dict[str, Any]]] = [
    (Event.RUN_OPENED, {}),
    (Event.CREATE_INTENDED, {"attempt": 1, "token": "gr-x-1", "provider": "local", "deadline_wall": 100.0}),
    (Event.CREATE_OBSERVED, {"token": "gr-x-1", "instance": INSTANCE, "adopted": False}),
    (Event.READY_OBSERVED, {"id": "i-1", "instance": INSTANCE, "facts": {}, "seconds": 1}),
    (Event.SHIP_OBSERVED, {}),
    (Event.TRAIN_STARTED, {}),
    (Event.TRAIN_OBSERVED, {"outcome": "done", "reason": "done"}),
    (Event.COLLECT_OBSERVED, {}),
    (Event.DESTROY_INTENDED, {}),
    (Event.DEATH_PROVEN, {"teardown": "destroyed"}),
    (Event.RECEIPT_OBSERVED, {}),
    (Event.RUN_CLOSED, {"exit_code": 0}),
]
LATE = (Event.INCIDENT, {"code": "create.late", "message": "", "id": "i-0", "token": "gr-x-0"})
LATE_GONE = (Event.INCIDENT, {"code": "create.late_gone", "message": "", "id": "i-0", "token": "gr-x-0"})
NEXT = [
    Step.CREATE, Step.CREATE, Step.AWAIT_READY, Step.SHIP, Step.START, Step.WATCH, Step.COLLECT, Step.DESTROY,
    Step.DESTROY, Step.SETTLE, Step.CLOSE, None,
]  # fmt: skip


def state_after(count: int, *more: tuple[Event, dict[str, Any]]) -> RunState:
    story = [*STORY[:count], *more]
    return replay_journal("x", [record(i, e, i, d) for i, (e, d) in enumerate(story)])


@pytest.mark.parametrize("count", range(1, len(STORY) + 1))
def test_each_record_leads_to_the_next_step(count: int) -> None:
    assert next_step(state_after(count)) is NEXT[count - 1]


def test_it_may_be_billing_from_the_intent_to_the_proven_death() -> None:
    billing = [state_after(count).may_be_billing for count in range(1, len(STORY) + 1)]
    assert billing == [False] + [True] * 8 + [False] * 3


def failed(step: Step) -> tuple[Event, dict[str, Any]]:
    return Event.STEP_FAILED, {"step": str(step), "code": "x", "message": "x", "hint": "x", "exit_code": 6}


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_failure_before_training_leads_straight_to_destroy(count: int) -> None:
    assert next_step(state_after(count, failed(Step.SHIP))) is Step.DESTROY


def test_a_failure_in_the_watch_still_brings_home_what_exists() -> None:
    assert next_step(state_after(6, failed(Step.WATCH))) is Step.COLLECT


def test_a_failed_collect_is_not_tried_for_ever() -> None:
    assert next_step(state_after(7, failed(Step.COLLECT))) is Step.DESTROY


def test_an_unanswered_create_is_looked_for_despite_a_stop() -> None:
    stop = (Event.STOP_REQUESTED, {"how": "now", "by": "user", "reason": ""})
    assert next_step(state_after(2, stop)) is Step.CREATE


@pytest.mark.parametrize("how", ["save", "now"])
def test_a_stop_in_training_watches_on_until_the_trainer_ends(how: str) -> None:
    assert next_step(state_after(6, (Event.STOP_REQUESTED, {"how": how, "by": "user", "reason": ""}))) is Step.WATCH


def test_destroy_collects_nothing() -> None:
    stop = (Event.STOP_REQUESTED, {"how": "destroy", "by": "user", "reason": ""})
    assert next_step(state_after(6, stop)) is Step.DESTROY
    assert next_step(state_after(7, stop)) is Step.DESTROY


@given(count=st.integers(3, 8), extra=st.lists(st.sampled_from(list(Step)), max_size=4))
def test_when_the_lease_is_over_only_destroy_comes_next(count: int, extra: list[Step]) -> None:
    state = state_after(count, *(failed(step) for step in extra))
    assert next_step(state, lease_over=True) is Step.DESTROY


@given(st.lists(st.sampled_from([*STORY, LATE, LATE_GONE]), max_size=30))
def test_replay_is_total_and_an_open_token_never_ends_quietly(story: list[tuple[Event, dict[str, Any]]]) -> None:
    records = [record(i, e, i, d) for i, (e, d) in enumerate(story)]
    state = replay_journal("x", records)
    if state.may_be_billing:
        assert exit_code_of(state) is ExitCode.MAY_BE_BILLING
        assert next_step(state) is not None


@pytest.mark.parametrize(
    ("outcome", "reason", "code"),
    [("done", "done", 0), ("stopped", "user", 0), ("stopped", "lease", 7), ("failed", "error", 6), ("lost", "lost", 6)],
)
def test_the_exit_code_tells_how_training_ended(outcome: str, reason: str, code: int) -> None:
    story = [*STORY]
    story[6] = (Event.TRAIN_OBSERVED, {"outcome": outcome, "reason": reason})
    records = [record(i, e, i, d) for i, (e, d) in enumerate(story)]
    assert exit_code_of(replay_journal("x", records)) == code


@pytest.mark.parametrize("count", [10, 11, 12])
def test_a_late_machine_is_settled_first_even_in_a_closed_run(count: int) -> None:
    assert state_after(count, LATE).may_be_billing
    assert next_step(state_after(count, LATE)) is Step.SETTLE
    assert next_step(state_after(count, LATE, LATE_GONE)) is NEXT[count - 1]


@pytest.mark.parametrize(("fields", "is_red"), [({}, False), ({"token": "gr-x-1", "billed": True}, True)])
def test_what_was_left_is_settled_first_where_it_is_billed(fields: dict[str, Any], is_red: bool) -> None:
    left = (Event.INCIDENT, {"code": "leftover", "message": "", **fields})
    gone = (Event.INCIDENT, {"code": "leftover_gone", "message": "", "token": "gr-x-1"})
    assert state_after(10, left).may_be_billing is is_red
    assert next_step(state_after(11, left)) is (Step.SETTLE if is_red else Step.CLOSE)
    assert next_step(state_after(11, left, gone)) is Step.CLOSE


def test_one_late_machines_end_is_not_the_end_of_the_other() -> None:
    other = (Event.INCIDENT, {"code": "create.late", "message": "", "id": "i-2"})
    assert state_after(10, LATE, other, LATE_GONE).late == {"i-2": ""}


def test_a_run_closed_red_gets_its_exit_code_once_all_is_gone() -> None:
    story = [*STORY[:10], LATE, STORY[10], (Event.RUN_CLOSED, {"exit_code": 9}), LATE_GONE]
    records = [record(i, e, i, d) for i, (e, d) in enumerate(story)]
    assert replay_journal("x", records[:-1]).exit_code == 9
    assert replay_journal("x", records).exit_code == 0


def test_stopped_before_anything_was_made_is_130() -> None:
    stop = (Event.STOP_REQUESTED, {"how": "now", "by": "signal", "reason": ""})
    state = state_after(1, stop, (Event.RECEIPT_OBSERVED, {}))
    assert exit_code_of(state) is ExitCode.INTERRUPTED
    assert state.phase is Phase.SETTLED


@pytest.mark.parametrize(
    ("how", "by", "outcome", "code"),
    [
        ("save", "SIGINT", "stopped", 130),
        ("save", "SIGTERM", "stopped", 143),
        ("save", "SIGTERM", "done", 0),
        ("save", "", "stopped", 0),
        ("now", "SIGTERM", "", 143),
    ],
)
def test_a_signal_sets_the_exit_code_and_a_users_stop_does_not(how: str, by: str, outcome: str, code: int) -> None:
    signal = {"signal": by} if by else {}
    stop = (Event.STOP_REQUESTED, {"how": how, "by": "signal" if by else "user", "reason": "", **signal})
    ends = [(Event.TRAIN_OBSERVED, {"outcome": outcome, "reason": ""})] if outcome else []
    assert exit_code_of(state_after(1, stop, *ends, (Event.RECEIPT_OBSERVED, {}))) == code
