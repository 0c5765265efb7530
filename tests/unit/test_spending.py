"""Tests that all displays of a run's cost agree, and say whether it is a figure, a bound, a floor, or still grows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.journal_records import Event
from gpurun.core.money import Figure, Micros
from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.billed_time import elapsed_s
from gpurun.ledger.runs import look_at_run
from gpurun.ledger.spending import spending
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.notices import Noticed
from gpurun.readers.run_status import run_data, run_row
from gpurun.view.live_state import Screen
from tests.golden import view_samples as samples
from tests.unit.ledger_samples import RATE, CloudRun
from tests.unit.other_rules import unpacked


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


class Dearer(CloudRun):
    """A run whose price doubles ten minutes into its training."""

    def until_dearer(self) -> Dearer:
        self.write(self.opened(), self.intended(), self.created())
        for seconds, note in self.through_training():
            self.clock.sleep(600 if note[0] is Event.TRAIN_OBSERVED else seconds)
            if note[0] is Event.TRAIN_OBSERVED:
                break
            self.write(note)
        fields = {"code": "price.rose", "message": "dearer", "token": self.token, "id": self.instance_id}
        self.write((Event.INCIDENT, {**fields, "rate_micros_per_hour": 2 * RATE, "since_wall": self.clock.wall()}))
        return self


def shown(run: CloudRun, now: float) -> dict[str, Micros | None]:
    """Return the cost of a run at a moment as the live view, the notices and the ledger each show it."""
    screen = Screen(samples.plan(offer=samples.offer(rate_micros_per_hour=1)), _reckon)
    screen.update(run.journal.records, [], [])
    cap = samples.plan(cap_micros=Micros(1))
    ((_, _, noticed), *_) = Noticed(run.folder, 0, cap).news(run.journal.records, now)
    return {"live view": screen.spent(now), "notices": Micros(noticed), "ledger": _reckon(run.journal.records, now)}


def _reckon(records: Any, now: float) -> Micros:
    return spending(records, now).micros


def test_a_risen_price_is_in_every_figure_while_it_runs(home: Home) -> None:
    """`ps` once said $21.52 instead of $25.02, because it computed the cost separately and without the risen price."""
    run = Dearer(home).until_dearer()
    run.clock.sleep(1800)
    request = next(record for record in run.journal.records if record.event is Event.CREATE_INTENDED)
    before_s = elapsed_s(run.journal.records, request, run.journal.records[-1])
    expected = -(-RATE * 60 * -(-(before_s + 1800) // 60) // 3600) + -(-RATE * 1800 // 3600)
    assert set(shown(run, run.clock.wall()).values()) == {int(expected)}


def test_all_say_the_same_as_the_receipt_once_it_is_over(home: Home) -> None:
    run = Dearer(home).until_dearer()
    run.clock.sleep(1800)
    run.play(run.death()).settle()
    cost = read_receipt(home, run.folder).predicate["cost"]
    assert cost["rentals"][0]["price_rose"]
    assert set(shown(run, run.clock.wall() + 9_999).values()) == {cost["upper_bound_micros"]}
    (row,) = audit(home).rows
    assert (row.measured_micros, row.measured_is, row.problems) == (cost["upper_bound_micros"], Figure.MEASURED, ())


def test_a_machine_its_timer_ended_costs_no_more_beside_another(home: Home) -> None:
    """The live view once counted to the proof of death, hours after the timer's end: $42.55 instead of $28.98."""
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    run.clock.sleep(8 * 3600)
    ids = {"id": run.instance_id, "token": run.token}
    run.write((Event.DESTROY_INTENDED, {**ids, "reason": "lease", "timer": True}))
    run.write((Event.DESTROY_ASKED, {**ids, "attempt": 1, "answer": "gone"}))
    read = {"id": run.instance_id, "state": "GONE", "listed": False, "answer_sha256": "0" * 64}
    for at_s in (0.0, 15.0, 30.0):
        run.clock.sleep(15)
        seen = {"at_s": at_s, "ended_wall": None, "ran_s": None, "alive_s_ago": None, "gone_s_ago": None}
        run.write((Event.DEATH_READ, {**read, **seen}))
    proof = {"id": run.instance_id, "teardown": "destroyed", "reads": 3, "spread_s": 30.0, "evidence_sha256": "0" * 64}
    run.write((Event.DEATH_PROVEN, proof))
    by_timer = -(-RATE * 60 * 86 // 3600)  # The lease of 85 minutes plus a minute for the kill.
    assert set(shown(run, run.clock.wall()).values()) == {by_timer}
    assert spending(run.journal.records).figure is Figure.BOUND
    run.token = "gr-fox-41-second"
    run.write(run.intended(2), run.created())
    run.clock.sleep(3600)
    assert set(shown(run, run.clock.wall()).values()) == {by_timer + RATE}


@pytest.mark.parametrize(
    ("is_watched", "more", "figure"),
    [
        (True, None, Figure.SO_FAR),
        (False, None, Figure.BOUND),
        (True, {"code": "leftover", "billed": True}, Figure.FLOOR),
    ],
    ids=["driven", "driven by nobody", "and something beside it"],
)
def test_a_figure_says_what_it_is(home: Home, is_watched: bool, more: dict[str, Any] | None, figure: Figure) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    if more:
        run.write((Event.INCIDENT, {**more, "message": "", "token": run.token}))
    assert spending(run.journal.records, run.clock.wall() + 60, is_watched=is_watched).figure is figure


def test_ps_calls_what_nobody_watched_a_bound(tmp_path: Path) -> None:
    """`ps` must mark this cost as a bound, because the machine may have ended long before."""
    home = unpacked("timer", tmp_path)
    sight = look_at_run(home, "fox-41")
    row = run_row(sight, sight.records[-1].wall)
    assert (row.spent_micros, row.spent_is) == (558_135, Figure.BOUND)
    assert run_data(sight, row)["spent_is"] == "bound"


def test_the_audits_column_calls_a_bound_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bound once stood in the audit's column MEASURED."""
    home = unpacked("timer", tmp_path)

    def typed(*words: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["gpurun", "audit", "--home", str(home.root), *words])
            assert run_app(build_app()) == 0
        return capsys.readouterr().out

    said = typed()
    assert ("≤$0.56" in said or "<=$0.56" in said, "MEASURED" in said) == (True, False)
    (row,) = json.loads(typed("--json"))["data"]["rows"]
    assert (row["measured_is"], row["measured_is_floor"]) == ("bound", False)


def test_a_receipt_says_measured_only_of_what_was_seen_to_end(home: Home) -> None:
    """A receipt once had `measured` in its JSON beside the words "at most"."""
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    extra = {"token": run.token, "id": "pod-2", "message": "a second one"}
    run.write((Event.INCIDENT, {**extra, "code": "create.duplicate"}))
    run.write((Event.INCIDENT, {**extra, "code": "create.duplicate_gone"}))
    run.play(run.death()).settle()
    cost = read_receipt(home, run.folder).predicate["cost"]
    assert (cost["is"], cost["says"].startswith("at most")) == ("bound", True)
    assert audit(home).sound
