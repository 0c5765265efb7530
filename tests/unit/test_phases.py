"""Tests of how paid seconds are divided into phases: each second counts once, and none on the machine's word alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.trainer_events import TrainerEvent, make_event
from gpurun.ledger import paid_phases
from gpurun.ledger.audit import audit
from gpurun.ledger.paid_phases import TrainingSplit
from gpurun.ledger.write_receipt import read_receipt, write_receipt
from gpurun.view import receipt_screen
from tests.later import examples
from tests.unit.ledger_samples import CloudRun

START = {"kind": "start", "step": 0, "elapsed_s": 12.0}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def read(fields: dict[str, Any]) -> TrainerEvent:
    event = make_event(fields)
    assert event is not None
    return event


def runtime(run: CloudRun) -> dict[str, Any]:
    """Settle the run, assert that the audit agrees with its receipt, and return the receipt's division of the time."""
    run.settle()
    assert {row.problems for row in audit(run.home).rows} == {()}
    account: dict[str, Any] = read_receipt(run.home, run.folder).predicate["runtime"]
    if account["billable_s"] is not None:
        assert round(sum(account["phases_s"].values()), 3) == account["billable_s"]
    return account


def changed(run: CloudRun, event: Event, **more: Any) -> CloudRun:
    """Play a run to its end with extra fields in each record of one event."""
    append = run.journal.write

    def saying_more(what: Event, data: dict[str, Any]) -> Any:
        return append(what, data | more if what is event else data)

    run.journal.write = saying_more  # type: ignore[method-assign,assignment]
    return run.until_gone()


def with_events(run: CloudRun, *events: dict[str, Any]) -> CloudRun:
    run.folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_every_paid_second_is_in_one_phase(home: Home) -> None:
    account = runtime(CloudRun(home).until_gone())
    phases = {"boot": 111.0, "upload": 200.0, "training": 3002.0, "collect": 25.0, "destroy": 33.0, "other": 0.0}
    assert account["phases_s"] == phases


def test_the_screen_of_a_receipt_leaves_no_phase_out() -> None:
    """A receipt once counted six paid minutes of holding the machine, which its screen did not show."""
    parts = {part for _, last in paid_phases._LAST_PARTS.values() for part, _ in last}
    assert {*paid_phases._BEGINS.values(), *parts} == {*receipt_screen._PHASES}


def test_connecting_and_unpacking_end_the_phases_they_belong_to(home: Home) -> None:
    assert runtime(changed(CloudRun(home), Event.SHIP_OBSERVED, unpack_s=15.5))["phases_s"]["unpack"] == 15.5
    other = runtime(changed(CloudRun(home, "owl-07"), Event.READY_OBSERVED, connect_s=8.0))["phases_s"]
    assert (other["boot"], other["connect"]) == (103.0, 8.0)
    more_than_all = runtime(changed(CloudRun(home, "elk-33"), Event.SHIP_OBSERVED, unpack_s=9999.0))["phases_s"]
    assert (more_than_all["upload"], more_than_all["unpack"]) == (0.0, 200.0)


def test_a_set_up_is_a_part_of_its_own_with_a_limit_of_its_own(home: Home) -> None:
    run = changed(CloudRun(home), Event.READY_OBSERVED, connect_s=8.0, setup_s=60.0)
    account = runtime(run)
    assert [account["phases_s"][name] for name in ("boot", "setup", "connect")] == [43.0, 60.0, 8.0]
    assert "setup" not in account["planned"]["limits_s"], "a lease of an older gpurun had none"


def test_an_abandoned_machine_counts_with_the_one_that_followed(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    run.clock.sleep(300)
    run.play(run.death())
    run.token += "-again"
    run.write(run.intended(2)).clock.sleep(3)
    run.write(run.created()).play(run.through_training(), run.death())
    phases = runtime(run)["phases_s"]
    assert (phases["boot"], phases["destroy"]) == (300.0 + 111.0, 33.0 + 33.0)


def test_a_create_that_was_refused_has_no_paid_seconds(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended()).clock.sleep(50)
    run.write((Event.CREATE_REFUSED, {"token": run.token, "reason": "no_capacity", "message": "none"}))
    assert runtime(run) | {"is": ""} == {
        "is": "", "billable_s": 0.0, "phases_s": {"other": 0.0}, "planned": None,
        "training": {"is": "instance-reported", "seconds": None},
    }  # fmt: skip


def test_a_perhaps_living_machine_shows_seconds_but_no_total(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    run.play(run.through_training())
    write_receipt(run.home, run.folder)
    assert not [problem for row in audit(run.home).rows for problem in row.problems if "runtime" in problem]
    account = read_receipt(run.home, run.folder).predicate["runtime"]
    assert (account["billable_s"], account["phases_s"]["training"]) == (None, 3002.0)


def test_the_plans_own_figures_stand_beside_them(home: Home) -> None:
    run = CloudRun(home)
    plan = run.plan()
    offer = run.intended()[1]["offer"]
    plan["candidates"] = [{"offer": {}, "estimate": None}, {"offer": offer, "estimate": {"train_s": [1000.0, 3100.0]}}]
    plan["candidates"] = [row | {"worst_micros": 0} for row in plan["candidates"]]
    run.folder.plan.write_text(json.dumps(plan))
    planned = runtime(run.until_gone())["planned"]
    limits = {"boot": 300, "upload": 600, "training": 3600, "collect": 300, "destroy": 300}
    assert planned == {"is": "planned", "limits_s": limits, "training_s": [1000.0, 3100.0]}


# Within the training: what the machine reports


def test_the_training_phase_divides_as_the_trainer_tells(home: Home) -> None:
    steps = [{"kind": "step", "step": s, "step_s": 10.0, "elapsed_s": 100.0 + 10 * s} for s in (1, 100, 200)]
    eval_and_save = [{"kind": "eval", "eval_s": 30.0}, {"kind": "checkpoint", "stall_s": 2.5, "save_s": 50.0}]
    training = runtime(with_events(CloudRun(home), START, *steps, *eval_and_save).until_gone())["training"]
    assert training["is"] == "instance-reported"
    assert training["seconds"] == {
        "import": 12.0, "compile": 88.0, "steps": 2000.0, "eval": 30.0, "checkpoint": 2.5,
        "other": 3002.0 - 12 - 88 - 2000 - 30 - 2.5,
    }  # fmt: skip


def test_a_trainer_started_twice_imports_and_compiles_twice() -> None:
    split = TrainingSplit()
    for step in (0, 50):
        split.take(read(START | {"step": step}))
        split.take(read({"kind": "step", "step": step + 1, "step_s": 61.0, "elapsed_s": 73.0}))
        split.take(read({"kind": "step", "step": step + 11, "step_s": 1.0, "elapsed_s": 83.0}))
    parts = split.within(1000.0)
    assert parts is not None
    assert (parts["import"], parts["compile"], parts["steps"]) == (24.0, 120.0, 22.0)


def test_words_that_claim_more_than_there_was_are_not_kept(home: Home) -> None:
    account = runtime(with_events(CloudRun(home), START, {"kind": "eval", "eval_s": 1e9}).until_gone())
    assert account["training"]["seconds"] is None
    assert account["phases_s"]["training"] == 3002.0, "the total is this laptop's"


def test_a_step_time_told_too_long_takes_only_what_there_was() -> None:
    split = TrainingSplit()
    for event in (START, *({"kind": "step", "step": s, "step_s": 10.0, "elapsed_s": 22.0} for s in (1, 500))):
        split.take(read(event))
    assert split.within(100.0) == {
        "import": 12.0, "compile": 0.0, "steps": 88.0, "eval": 0.0, "checkpoint": 0.0, "other": 0.0,
    }  # fmt: skip


FIGURES = st.one_of(
    st.sampled_from([0, 1, -1, 1e300, 1e11, 1 << 52, 1 << 70, True, None, "12", [], 0.1, 1e-7]), st.floats(0, 1e4)
)
EVENTS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["start", "step", "step", "eval", "checkpoint"])},
    optional=dict.fromkeys(("elapsed_s", "step_s", "eval_s", "stall_s"), FIGURES)
    | {"step": st.one_of(FIGURES, st.integers(0, 100))},
)


@settings(max_examples=examples(300), deadline=None)
@given(events=st.lists(EVENTS, max_size=12), training_s=st.sampled_from([0.0, 0.001, 50.0, 1234.567, 1e6]))
def test_the_parts_always_sum_to_the_training_time(events: list[dict[str, Any]], training_s: float) -> None:
    split = TrainingSplit()
    for event in events:
        split.take(read(event))
    parts = split.within(training_s)
    if parts is not None:
        assert round(sum(parts.values()), 3) == training_s
        assert min(parts.values()) >= 0
