"""Tests of `gpurun audit`, and of `doctor` on the same chain: an older head, a broken ledger, and providers' bills."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import Charge, Instance, InstanceState
from gpurun.ledger import audit as audit_room
from gpurun.ledger.run_lock import RunLock
from gpurun.providers.base import Unknown
from gpurun.readers.replay import Replayed
from tests.refusals import lacking
from tests.unit.ledger_samples import CloudRun, finished_run


@pytest.fixture
def home(own_home: Path) -> Home:
    home = Home(own_home).prepare()
    finished_run(home)
    return home


def head_of(home: Home) -> str:
    return str(json.loads(home.ledger.read_bytes().splitlines()[-1])["receipt_sha256"])


def test_receipts_of_before_that_day_are_not_said_to_be_missing(home: Home, gpurun: Any, tmp_path: Path) -> None:
    """`audit --since` once began with "No receipts yet." although older receipts existed."""
    _, said, _ = gpurun("audit", "--since", "2099-01-01")
    assert said.splitlines()[0] != gpurun("audit", "--home", str(tmp_path))[1].splitlines()[0]
    assert "1 receipt " in said


def test_a_row_that_does_not_hold_shows_no_forged_verdict(home: Home, gpurun: Any) -> None:
    plan = home.run("fox-41").plan
    plan.write_bytes(plan.read_bytes().replace(b"gpt2", b"gpt9"))
    code, said, _ = gpurun("audit")
    (row,) = [line for line in said.splitlines() if line.split()[:1] == ["fox-41"]]
    assert (code, row.rstrip().endswith("DOES NOT HOLD"), "gpu" in row) == (10, True, False)
    assert json.loads(gpurun("audit", "--json")[1])["data"]["rows"][0]["verdict"] == "does not hold"


def test_a_replay_takes_only_the_last_run_unless_asked_for_all(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of all runs takes many minutes, so it needs `--all`."""
    finished_run(home, "gnu-42")
    computed: list[str] = []

    def replayed(folder: RunFolder, predicate: Any, recipe: Any, data: Path, say: Any) -> Replayed:
        say("300 steps, about 8 s")
        computed.append(folder.name)
        return Replayed.nothing("it is a sample")

    monkeypatch.setattr("gpurun.readers.replay.replay_run", replayed)
    assert json.loads(gpurun("audit", "--replay", "--json")[1])["data"]["replayed"] == {"gnu-42": "nothing"}
    assert computed == ["gnu-42"]
    gpurun("audit", "--replay", "--all")
    assert computed == ["gnu-42", "fox-41", "gnu-42"]


def test_the_head_is_printed_whole_so_that_it_can_be_kept(home: Home, gpurun: Any) -> None:
    assert f"head {head_of(home)}\n" in gpurun("audit")[1]


def test_a_head_in_capitals_is_the_same_head(home: Home, gpurun: Any) -> None:
    code, said, _ = gpurun("audit", "--head", f" {head_of(home).upper()} ")
    assert (code, "chain unbroken" in said) == (0, True)


@pytest.mark.parametrize("written", ["", "5243", "5243…435e", "g" * 64, "a" * 65])
def test_what_is_no_whole_head_is_refused_and_no_broken_chain(written: str, home: Home, gpurun: Any) -> None:
    code, said, _ = gpurun("audit", "--head", written, "--json")
    assert (code, json.loads(said)["errors"][0]["code"]) == (2, "audit.bad_head")


def test_a_head_missing_from_the_chain_is_a_problem_and_counted(home: Home, gpurun: Any) -> None:
    code, said, _ = gpurun("audit", "--head", "a" * 64)
    assert (code, "CHAIN BROKEN" in said, " 1 problem" in said) == (10, True, True)


def test_doctor_and_audit_agree_on_a_broken_ledger(home: Home, gpurun: Any) -> None:
    with home.ledger.open("a") as ledger:
        ledger.write("junk\n")
    code, said, _ = gpurun("audit")
    assert (code, "CHAIN BROKEN" in said, " 1 problem" in said) == (10, True, True)
    code, said, _ = gpurun("doctor", "--json")
    (finding,) = [one for one in json.loads(said)["data"]["findings"] if "chain" in one["text"]]
    assert (code, finding["level"], finding["hint"]) == (4, "bad", "gpurun audit")


def test_doctor_and_audit_say_which_file_cannot_be_read(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("gpurun.ledger.audit.strict_lines._split_lines", forbidden)
    code, said, _ = gpurun("audit", "--json")
    assert (code, json.loads(said)["errors"][0]["code"]) == (4, "ledger.unreadable")
    code, said, _ = gpurun("doctor", "--json")
    texts = [finding["text"] for finding in json.loads(said)["data"]["findings"] if finding["level"] == "bad"]
    assert [lacking(text, str(home.ledger), "Permission denied") for text in texts] == [[]]


def test_a_run_that_ends_well_while_others_are_read_is_not_lost(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CloudRun(home, "owl-07")
    run.write(run.opened(), run.intended(), run.created())
    supervisor, real = RunLock(run.folder.lock), audit_room.audit

    def ends_meanwhile(*asked: Any, **how: Any) -> Any:
        report = real(*asked, **how)
        run.play(run.through_training(), run.death()).settle()
        supervisor.__exit__(None, None, None)
        return report

    monkeypatch.setattr(audit_room, "audit", ends_meanwhile)
    with supervisor:
        code, said, _ = gpurun("audit")
    assert (code, "MAY BE BILLING" in said) == (0, False)
    assert gpurun("audit")[0] == 0


def test_an_undriven_run_that_may_be_billing_is_exit_9(home: Home, gpurun: Any) -> None:
    run = CloudRun(home, "owl-07")
    run.write(run.opened(), run.intended(), run.created())
    code, said, _ = gpurun("audit")
    assert (code, "MAY BE BILLING" in said) == (9, True)


@pytest.mark.parametrize(
    ("left", "gone"),
    [
        ({"code": "create.late", "id": "pod-2"}, {"code": "create.late_gone", "id": "pod-2"}),
        ({"code": "leftover", "billed": True}, {"code": "leftover_gone"}),
    ],
    ids=["a machine that came late", "a disk beside it"],
)
def test_what_the_receipt_calls_unknown_is_a_floor_in_the_table(
    home: Home, gpurun: Any, left: dict[str, Any], gone: dict[str, Any]
) -> None:
    run = CloudRun(home, "owl-07").until_gone()
    run.write(*((Event.INCIDENT, {**fields, "message": "x", "token": run.token}) for fields in (left, gone))).settle()
    code, said, _ = gpurun("audit")
    assert code == 0
    lines = [line.split() for line in said.splitlines() if "✔" in line]
    assert [(cells[0], cells[5]) for cells in lines] == [("fox-41", "$2.37"), ("owl-07", "≥$2.37")]
    assert "total ≥$4.74" in said
    rows = json.loads(gpurun("audit", "--json")[1])["data"]["rows"]
    assert [row["measured_is_floor"] for row in rows] == [False, True]


class Billing:
    """A provider that knows no machine and answers only what a machine was charged."""

    def __init__(self, billed: str | None, *, is_settled: bool = True) -> None:
        self.billed, self.is_settled, self.asked = billed, is_settled, list[tuple[str, float]]()

    def charges(self, instance_id: str, from_wall: float, to_wall: float) -> Charge | None:
        self.asked.append((instance_id, to_wall - from_wall))
        if self.billed is None:
            return None
        return Charge(provider="runpod", instance_id=instance_id, micros=usd(self.billed), settled=self.is_settled)

    def read(self, instance_id: str) -> Instance:
        return Instance(id=instance_id, provider="runpod", token="", run="", state=InstanceState.GONE)


def of_provider(monkeypatch: pytest.MonkeyPatch, provider: object) -> None:
    monkeypatch.setattr("gpurun.providers.registry.open_provider", lambda name, **_: provider)


def row_of(said: str) -> dict[str, Any]:
    (row,) = json.loads(said)["data"]["rows"]
    return dict(row)


@pytest.mark.parametrize(("billed", "code"), [("2.30", 0), ("2.37", 0), ("2.40", 10)])
def test_billed_stands_beside_measured_and_more_is_a_problem(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch, billed: str, code: int
) -> None:
    """The receipt's bound is $2.3655. A bill of $2.37 is only rounded; a bill of $2.40 is a problem."""
    of_provider(monkeypatch, provider := Billing(billed))
    exit_code, said, _ = gpurun("audit", "--against-bill", "--json")
    assert (exit_code, row_of(said)["billed_micros"], row_of(said)["billed_is_settled"]) == (code, usd(billed), True)
    assert any("was billed" in problem for problem in row_of(said)["problems"]) == (code == 10)
    (instance_id, seconds), *_ = provider.asked
    assert instance_id == "pod-fox-41"
    assert seconds > 3000, "from before it was asked for until it was gone"
    assert f"${billed}" in gpurun("audit", "--against-bill")[1]
    assert "$2.30" not in gpurun("audit")[1], "nobody is asked unless that is wanted"


def test_a_bill_that_may_still_grow_is_called_so(home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_provider(monkeypatch, Billing("1.00", is_settled=False))
    code, said, _ = gpurun("audit", "--against-bill", "--json")
    assert (code, row_of(said)["billed_is_settled"]) == (0, False)
    assert gpurun("audit", "--against-bill")[1].count("fox-41") > gpurun("audit")[1].count("fox-41")


def test_the_bill_of_a_perhaps_living_machine_is_not_settled(
    own_home: Path, gpurun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CloudRun(home := Home(own_home).prepare(), "fox-41")
    run.write(run.opened(), run.intended(), run.created())
    run.play(run.through_training())
    of_provider(monkeypatch, Billing("1.00"))
    code, said, _ = gpurun("audit", "--against-bill", "--json")
    assert home.run_names() == ["fox-41"]
    assert (code, row_of(said)["billed_micros"], row_of(said)["billed_is_settled"]) == (9, usd(1), False)


@pytest.mark.parametrize(
    ("provider", "cause"),
    [(Billing(None), "yet"), (object(), "machine"), (None, "key")],
    ids=["too early", "tells none", "no key"],
)
def test_a_bill_that_cannot_be_had_is_unknown_and_says_why(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch, provider: object, cause: str
) -> None:
    if provider is not None:
        of_provider(monkeypatch, provider)
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    code, said, _ = gpurun("audit", "--against-bill", "--json")
    assert (code, row_of(said)["billed_micros"]) == (0, None)
    assert lacking(row_of(said)["billed_unclear"][0], "runpod", cause) == []


def test_a_providers_words_for_a_bill_steer_no_terminal(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shouting(Billing):
        def charges(self, *asked: Any) -> Any:
            raise Unknown("\x1b]0;all is well\x07 busy")

    of_provider(monkeypatch, Shouting(None))
    _, said, _ = gpurun("audit", "--against-bill", "--json")
    (unclear,) = row_of(said)["billed_unclear"]
    assert lacking(unclear, "runpod", "\\u{1b}]0;all is well\\u{7} busy") == []
