"""Tests of a home that a newer gpurun has written: unknown keys in every record, and records of an unknown event.

A damaged journal or plan must harm only its own run, and that run's machine must still be ended with a proof of death.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import ExitCode
from gpurun.core.journal_events import CLASSES, INCIDENTS, JournalEvent, StopRequested, class_of, may_be_damage
from gpurun.core.journal_records import Event, Record
from gpurun.core.paths import Home
from gpurun.core.records import canonical
from gpurun.core.stop_request import ask_to_stop
from gpurun.ledger import journal as journals
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import Journal, read_journal
from gpurun.ledger.runs import look_at_run
from gpurun.lifecycle.reaper import sweep
from gpurun.providers.local import LocalProvider
from tests.command_line import gpurun
from tests.lifecycle.scripted_cloud import Killed, World
from tests.lifecycle.tiny_runs import drive, events_of, make_run
from tests.unit.ledger_samples import CloudRun
from tests.unit.report_samples import plan_of
from tests.whole_records import whole

NEW = "lease.moved"


@pytest.fixture
def world(own: Home) -> World:
    return World(own)


@pytest.fixture
def tomorrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make journals as a newer gpurun would: each record has an unknown key.

    From `ready.observed` on, a record of an unknown event follows each record.
    """
    append = Journal.write

    def appended(self: Journal, event: Event, data: Mapping[str, Any]) -> Record:
        record = append(self, event, {**data, "novel": {"of": "tomorrow"}})
        if any(earlier.event is Event.READY_OBSERVED for earlier in self.records) and event is not Event.RUN_CLOSED:
            append(self, NEW, {"by_s": 60})  # type: ignore[arg-type]
        return record

    def wider(value: Any) -> bytes:
        return canonical({**value, "zone": "UTC"} if isinstance(value, dict) and "mono" in value else value)

    monkeypatch.setattr(Journal, "write", appended)
    monkeypatch.setattr(journals, "canonical", wider)


def killed_after(event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    def point(place: str) -> None:
        if place == f"after {event}":
            raise Killed(place)

    monkeypatch.setattr(journals, "crashpoint", point)


def types(home: Home, words: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> tuple[int, Any]:
    """Run one command in this home; return its exit code and its last envelope."""
    patch.setattr(sys, "argv", ["gpurun", *words.split(), "--json", "--home", str(home.root)])
    code = run_app(build_app())
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.usefixtures("tomorrow")
def test_a_run_that_it_wrote_is_read_by_every_verb_and_audited(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.drive() is ExitCode.DONE
    assert NEW in [str(record.event) for record in world.records]
    assert all(b'"zone":"UTC"' in line for line in world.folder.journal.read_bytes().splitlines())
    for words in ("ps --all", "receipt fox-41", "attach fox-41", "logs fox-41", "resume fox-41", "stop fox-41"):
        code, _ = types(world.home, words, capsys, monkeypatch)
        assert code == 0, words
    code, envelope = types(world.home, "audit", capsys, monkeypatch)
    assert (code, NEW in str(envelope)) == (0, True), [envelope["data"]["rows"][0]["problems"], envelope["errors"]]


@pytest.mark.usefixtures("tomorrow")
@pytest.mark.parametrize("event", [Event.CREATE_OBSERVED, Event.READY_OBSERVED, Event.TRAIN_STARTED, Event.DEATH_READ])
def test_a_run_that_it_began_goes_on_here_and_ends_with_proof(
    world: World, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed_after(event, patch)
        assert world.drive() == "killed"
    assert world.drive() is ExitCode.DONE
    assert world.cloud.alive == []
    assert audit(world.home).problems == ()


@pytest.mark.usefixtures("tomorrow")
@pytest.mark.parametrize("event", [Event.CREATE_INTENDED, Event.CREATE_OBSERVED, Event.TRAIN_STARTED])
def test_it_is_destroyed_and_reaped(world: World, event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        killed_after(event, patch)
        assert world.drive() == "killed"
    world.clock.sleep(48 * 3600)
    if event is not Event.CREATE_INTENDED:
        (found,) = sweep([world.cloud], world.home, world.clock, destroy_all=False, older_than_s=0.0, look_only=True)
        assert found.fate == "overdue"
    ask_to_stop(world.folder, "destroy", by="user", reason="a test")
    assert world.drive() is ExitCode.INTERRUPTED
    assert (world.cloud.alive, world.state.may_be_billing) == ([], False)


def test_nothing_is_rented_on_an_event_that_it_does_not_know(
    own: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(own)
    with monkeypatch.context() as patch:
        killed_after(Event.RUN_OPENED, patch)
        assert world.drive() == "killed"
    Journal.open(world.folder.journal, world.clock).write(NEW, {})  # type: ignore[arg-type]
    before = world.folder.journal.read_bytes()
    assert world.drive() == "journal.newer"
    assert (world.cloud.boxes, world.folder.journal.read_bytes()) == ([], before)
    code, envelope = types(own, "resume fox-41", capsys, monkeypatch)
    assert (code, envelope["errors"][0]["code"]) == (10, "journal.newer")
    assert NEW in envelope["errors"][0]["message"]
    ask_to_stop(world.folder, "destroy", by="user", reason="a test")
    assert world.drive() is ExitCode.INTERRUPTED
    assert world.cloud.boxes == []


@pytest.mark.parametrize(
    "event", [event for event in CLASSES if may_be_damage(event, {}) and event is not Event.RUN_OPENED]
)
def test_a_record_that_lacks_a_read_field_damages_its_run_alone(
    own: Home, event: Event, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that lacks a field must damage only its own run: it once ended every command with a KeyError."""
    odd = Journal.open(make_run(own, "odd-1").journal, VirtualClock())
    odd.write(Event.RUN_OPENED, {"run": "odd-1"})
    odd.write(event, {"novel": 1})
    make_run(own, "owl-7")
    code, envelope = types(own, "ps", capsys, monkeypatch)
    rows = {row["run"]: row["damage"] for row in envelope["data"]["runs"]}
    assert (rows["owl-7"], bool(rows["odd-1"])) == (None, True), envelope
    assert code in ((9,) if event is Event.CREATE_INTENDED else (0, 10)), "a hidden intent may have made a machine"
    for words in ("audit", "reap --providers-of-nobody", "receipt odd-1", "resume odd-1", "logs odd-1"):
        code, envelope = types(own, words, capsys, monkeypatch)
        assert all(error["code"] != "bug" for error in envelope["errors"]), (words, envelope)


def test_the_journal_page_documents_every_field_of_each_event() -> None:
    rows = Path("docs/JOURNAL.md").read_text().splitlines()
    for kind in (*CLASSES.values(), *INCIDENTS.values()):
        (row,) = [row for row in rows if row.startswith(f"| `{kind.event}` |")]
        of_all = set() if "instance" in kind.__annotations__ else set(JournalEvent.model_fields)
        assert {key for key in kind.model_fields if f"`{key}`" not in row} <= of_all, kind


def test_every_key_written_is_a_field_of_its_event_class(world: World) -> None:
    assert world.drive() is ExitCode.DONE
    assert read_journal(world.folder.journal).damage is None
    for record in world.records:
        assert record.typed.as_data() == record.data, record.event
        assert type(record.typed) is class_of(record.event, record.data)


@pytest.mark.parametrize(
    ("event", "data", "key"),
    [
        (Event.TRAIN_STARTED, {"keeper_pid": "x", "pushed": "s3://a"}, "keeper_pid"),
        (Event.RATE_OBSERVED, {"finishes": "yes", "step": 60}, "finishes"),
    ],
)
def test_an_odd_optional_field_does_not_count_as_damage(event: Event, data: dict[str, Any], key: str) -> None:
    record = Record(seq=1, prev="", wall=0, mono=0, boot_id="", event=event, data=data)
    assert record.typed.as_data() == {name: value for name, value in data.items() if name != key}


@pytest.mark.parametrize("broken", [b"not json", b"", None], ids=["nonsense", "empty", "gone"])
def test_a_machine_with_a_damaged_plan_is_destroyed_and_proven(
    own: Home, broken: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`destroy` must end the machine of a run with a damaged plan.

    It once refused with exit code 10 while the machine lived.
    """
    folder = make_run(own)
    assert drive(own, GPURUN_CRASH_AT="after train.started").returncode == -9
    folder.plan.write_bytes(broken) if broken is not None else folder.plan.unlink()
    monkeypatch.setenv("GPURUN_HOME", str(own.root))
    listed = gpurun("ps", "--json")
    (row,) = json.loads(listed.stdout)["data"]["runs"]
    assert (listed.returncode, row["may_be_billing"]) == (9, True)
    assert "plan" in row["damage"]
    resumed = gpurun("resume", "fox-41")
    assert resumed.returncode == 9, "something may be billed"
    assert "gpurun destroy fox-41" in resumed.stderr
    assert LocalProvider(own, SystemClock()).find(None), "and nothing was done"
    destroyed = gpurun("destroy", "fox-41", "--yes")
    assert destroyed.returncode == 0, destroyed.stderr
    assert LocalProvider(own, SystemClock()).find(None) == []
    assert events_of(folder)[-1] == "run.closed"
    assert folder.receipt.exists()
    assert gpurun("ps").returncode == 0, "nothing of it is open, and nothing is billed"
    assert gpurun("ps", "--all").returncode == 10, "the plan is still damaged"


@pytest.mark.parametrize("cap_micros", [12_000_000, 900_000_000], ids=["its own", "another"])
def test_the_plan_of_a_later_machine_must_match_the_journal(own: Home, cap_micros: int) -> None:
    """A later machine's plan that the journal's digest does not match is refused.

    The user may never have agreed to its cap.
    """
    run = CloudRun(own)
    agreed, leg = plan_of("fox-41").to_json(), run.folder.legs / "2.json"
    planned = {"plan": leg.name, "plan_sha256": hashlib.sha256(agreed.encode()).hexdigest()}
    run.write(run.opened(), run.intended(), (Event.LEG_PLANNED, whole(Event.LEG_PLANNED, planned)))
    leg.parent.mkdir()
    leg.write_text(agreed.replace('"cap_micros": 12000000', f'"cap_micros": {cap_micros}'))
    sight = look_at_run(own, "fox-41")
    assert sight.plan.cap_micros == 12_000_000
    assert (sight.plan_lost is not None) == (cap_micros != 12_000_000), "and resume refuses it"


def test_stop_keeps_the_checkpoints_of_a_run_with_a_damaged_plan(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(own, steps=2000)
    assert drive(own, GPURUN_CRASH_AT="after train.started").returncode == -9
    folder.plan.write_text("not json")
    monkeypatch.setenv("GPURUN_HOME", str(own.root))
    assert gpurun("stop", "fox-41").returncode == 0
    assert "collect.observed" in events_of(folder)
    assert list(folder.artifacts.rglob("*.safetensors"))


def test_the_stops_that_a_form_allows_are_those_that_there_are() -> None:
    from gpurun.core.stop_request import How

    assert set(get_args(StopRequested.model_fields["how"].annotation)) == set(get_args(How))
