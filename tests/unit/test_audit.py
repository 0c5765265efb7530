"""Tests of the audit: it computes every figure again, finds each kind of tampering, and warns of possible billing."""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpurun.ledger.audit as audit_room
from gpurun.core.clock import VirtualClock
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.journal_records import Event, Record
from gpurun.core.money import Micros
from gpurun.core.paths import Home, read_regular
from gpurun.core.receipt_rules import WORDS
from gpurun.core.records import canonical
from gpurun.ledger.audit import AuditRow, audit, rentals
from gpurun.ledger.journal import Journal, read_journal
from gpurun.ledger.rental import Rental
from gpurun.ledger.run_state import replay_journal
from gpurun.ledger.signing import PRIVATE_NAME, PUBLIC_NAME
from gpurun.ledger.write_receipt import read_receipt, write_receipt
from tests.refusals import lacking, refusal
from tests.unit.cost import dies
from tests.unit.ledger_samples import RATE, WEIGHTS, CloudRun, chain_anew, edit_lines, finished_run, forge_statement

Records = list[dict[str, Any]]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def only_row(home: Home, **asked: Any) -> AuditRow:
    (row,) = audit(home, **asked).rows
    return row


def test_a_sound_run_has_nothing_to_say(home: Home) -> None:
    finished_run(home)
    report = audit(home)
    (row,) = report.rows
    assert (row.problems, row.warnings, report.problems) == ((), (), ())
    assert (row.seq, row.chain, row.signature, row.files, row.death, row.verdict) == (
        1,
        "ok",
        "ok",
        "3/3",
        "proven",
        "gpu, rented",
    )
    assert row.measured_micros == report.total_micros == 57 * 60 * RATE // 3600
    assert report.sound
    assert not report.may_be_billing


def test_it_derives_with_code_of_its_own() -> None:
    """The audit must share no code with the writers of journals and receipts, or it would repeat their faults.

    Only audit_run.py may also import the three modules whose results it compares.
    """
    for path in Path(audit_room.__path__[0]).glob("*.py"):
        imported = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        own = {name for name in imported if name and name.startswith("gpurun.ledger")}
        allowed = ("gpurun.ledger.audit", "gpurun.ledger.signing")
        compared = {"gpurun.ledger.statement", "gpurun.ledger.log_facts", "gpurun.ledger.spending"}
        own -= compared if path.name == "audit_run.py" else set()
        assert all(name.startswith(allowed) for name in own), path


@pytest.mark.parametrize(
    ("figure", "fault", "where"),
    [
        ("micros", Micros(1), "cost.upper_bound_micros"),
        ("seconds", 1.0, "cost.rentals[0].billable_s"),
        ("end", "user_operated", "teardown.is"),
    ],
)
def test_a_money_or_death_fault_of_the_receipts_builder_is_found(
    home: Home, monkeypatch: pytest.MonkeyPatch, figure: str, fault: Any, where: str
) -> None:
    """A fault in the receipt's code for cost or end must be found, because the audit has separate code."""
    monkeypatch.setattr(Rental, figure, property(lambda rental: fault))
    finished_run(home)
    assert [where in problem for problem in only_row(home).problems].count(True) == 1


def test_seconds_are_summed_once_however_often_a_machine_is_seen(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Billed time is summed once: when it was summed at each reading, a week of readings took minutes."""
    run, calls = CloudRun(home), Counter[str]()
    run.write(run.opened(), run.intended(), run.created())
    run.play(run.through_training(), ((1.0, note) for note in [(Event.RATE_OBSERVED, {})] * 100))
    *reads, proof = run.death()
    for seconds, (event, data) in reads:
        is_read = event == Event.DEATH_READ
        looks = 100 if is_read and data["at_s"] == 0 else 1
        run.play((seconds, (event, {**data, **({"alive_s_ago": None} if is_read else {})})) for _ in range(looks))
    run.play(iter([proof])).settle()
    lines = len(run.journal.records)
    for room, name in ((rentals, "elapsed_s"), (Record, "us_since")):
        whole = getattr(room, name)
        monkeypatch.setattr(room, name, lambda a, b, name=name, whole=whole: calls.update([name]) or whole(a, b))
    assert only_row(home).verdict == "gpu, rented"
    assert (lines > 200, calls.keys()) == (True, {"elapsed_s", "us_since"})
    assert all(count < 10 * lines for count in calls.values()), calls


# Each kind of tampering ----------------------------------------------------------------------------------------------


def test_an_edited_figure_breaks_signature_and_chain(home: Home) -> None:
    folder = finished_run(home)
    envelope = json.loads(folder.receipt.read_bytes())
    envelope["payload"] = "A" + envelope["payload"][1:]
    folder.receipt.write_text(json.dumps(envelope))
    assert any("#1" in problem for problem in only_row(home).problems)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list) and value:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(one, (*path, key))
    else:
        yield path


def _another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value[:-1] + ("0" if value[-1:] != "0" else "1")
        case None:
            return 0
    return [{"made": "up"}]


def test_every_field_is_rederived_so_no_key_owner_can_edit_one(home: Home) -> None:
    """The key's owner can edit any field, sign it again, and adapt journal and chain: the audit must find that.

    Only texts for people are not checked; a code or a figure in another field says the same.
    """
    folder = finished_run(home)
    statement = _stated(home, folder)
    kept = {path: path.read_bytes() for path in (folder.receipt, folder.journal, home.ledger)}
    leaves = list(_leaves(statement))
    assert len(leaves) > 100
    unseen = []
    for leaf in leaves:
        forge_statement(home, folder, lambda payload, leaf=leaf: _edited(payload, leaf))
        if not only_row(home).problems:
            unseen.append(leaf)
        for path, content in kept.items():
            path.write_bytes(content)
    words = {tuple(path.replace("[]", "").split(".")) for path in WORDS}
    assert unseen
    assert {tuple(key for key in leaf if isinstance(key, str)) for leaf in unseen} <= words
    assert audit(home).sound


def _stated(home: Home, folder: Any) -> Any:
    return read_receipt(home, folder).statement


def _edited(payload: Any, leaf: tuple[Any, ...]) -> Any:
    inner = payload
    for key in leaf[:-1]:
        inner = inner[key]
    inner[leaf[-1]] = _another(inner[leaf[-1]])
    return payload


def test_a_field_that_is_added_or_left_out_is_seen_too(home: Home) -> None:
    folder = finished_run(home)
    forge_statement(home, folder, lambda body: {**body, "predicate": {**body["predicate"], "rating": "five stars"}})
    assert any("rating" in problem for problem in only_row(home).problems)


def test_a_commands_false_safetensors_file_is_only_a_warning(home: Home) -> None:
    class Command(CloudRun):
        def manifest(self) -> list[dict[str, Any]]:
            return [{**file, "kind": "checkpoint"} for file in super().manifest()]

        @staticmethod
        def contents() -> dict[str, bytes]:
            return {**CloudRun.contents(), WEIGHTS: b"a format of its own"}

    Command(home).until_gone().settle()
    row = only_row(home)
    assert (len(row.problems), len(row.warnings)) == (0, 1)
    assert WEIGHTS in row.warnings[0]


def test_a_swapped_checkpoint(home: Home) -> None:
    folder = finished_run(home)
    (folder.artifacts / WEIGHTS).write_bytes(b"heavier" * 100)
    row = only_row(home)
    assert [WEIGHTS in problem for problem in row.problems] == [True]
    assert row.files == "2/3"


def test_a_checkpoint_that_was_cleaned_away_is_a_warning(home: Home) -> None:
    folder = finished_run(home)
    (folder.artifacts / WEIGHTS).unlink()
    row = only_row(home)
    assert (row.problems, [WEIGHTS in warning for warning in row.warnings], row.files) == ((), [True], "2/3")


def test_a_removed_receipt(home: Home) -> None:
    folder = finished_run(home)
    folder.receipt.unlink()
    assert ["#1" in problem for problem in only_row(home).problems] == [True]


def test_a_removed_run_folder(home: Home) -> None:
    shutil.rmtree(finished_run(home).path)
    finished_run(home, "owl-07")
    rows = audit(home).rows
    assert [row.run for row in rows] == ["fox-41", "owl-07"]
    assert any("#1" in problem for problem in rows[0].problems)
    assert rows[1].problems == ()


def test_a_chain_rewritten_whole_is_seen_by_whoever_kept_a_head(home: Home) -> None:
    """A chain that was rewritten from the start is valid.

    Only a user who has kept an older head can detect the change.
    """
    folder = finished_run(home)
    kept = audit(home).head
    finished_run(home, "owl-07")
    assert audit(home, expected_head=kept).sound
    shutil.rmtree(folder.path)
    home.ledger.unlink()
    rest = home.run("owl-07")
    chain_anew(rest.journal, [json.loads(line) for line in rest.journal.read_bytes().splitlines()][:-2])
    rest.receipt.unlink()
    CloudRun.settle(_reopened(home, rest))
    assert audit(home).sound
    assert len(audit(home, expected_head=kept).problems) == 1


def _without_owl(links: Records) -> Records:
    """Remove the second of three receipts from the chain, and link the third to the first; the head stays the same."""
    return [links[0], links[2] | {"seq": 2, "prev": links[0]["receipt_sha256"]}]


def _spaced(receipt: Path) -> None:
    """Write the same envelope with other whitespace."""
    receipt.write_text(json.dumps(json.loads(receipt.read_bytes()), indent=3))


@pytest.mark.parametrize(
    ("change", "run"),
    [
        (lambda home: rewrite_chain(home, _without_owl), "elk-33"),
        (lambda home: home.run("owl-07").receipt.write_text("{}"), "owl-07"),
        (lambda home: _spaced(home.run("owl-07").receipt), "owl-07"),
        (lambda home: home.run("owl-07").receipt.unlink(), "owl-07"),
    ],
    ids=["removed with its line", "changed", "other bytes", "removed"],
)
def test_a_kept_head_covers_every_receipt_whichever_run_is_asked(
    home: Home, change: Callable[[Home], Any], run: str
) -> None:
    for name in ("fox-41", "owl-07", "elk-33"):
        finished_run(home, name)
    kept = audit(home).head
    assert audit(home, ["fox-41"], expected_head=kept).sound
    change(home)
    (problem,) = audit(home, ["fox-41"], expected_head=kept).problems
    assert lacking(problem, "#2", run) == []


def rewrite_chain(home: Home, change: Callable[[Records], Records]) -> None:
    links = change([json.loads(line) for line in home.ledger.read_bytes().splitlines()])
    home.ledger.write_bytes(b"".join(canonical(link) + b"\n" for link in links))


def _reopened(home: Home, folder: Any) -> CloudRun:
    run = object.__new__(CloudRun)
    run.home, run.folder, run.clock = home, folder, VirtualClock(start=1_900_000_000)
    run.clock.sleep(10_000)
    run.journal = Journal.open(folder.journal, run.clock)
    return run


def test_a_wrong_key(home: Home, tmp_path: Path) -> None:
    finished_run(home)
    other = Home(tmp_path / "other").prepare()
    finished_run(other)
    strange = (other.keys / PUBLIC_NAME).read_bytes()
    row = only_row(home, public_key=strange)
    assert row.signature == "bad"
    assert len(row.problems) == 1
    assert only_row(home, public_key=(home.keys / PUBLIC_NAME).read_bytes()).problems == ()
    with refusal(UsageError, "audit.bad_key", "ed25519"):
        audit(home, public_key=b"nonsense")


def test_a_signature_that_was_taken_off(home: Home) -> None:
    folder = finished_run(home)
    envelope = json.loads(folder.receipt.read_bytes())
    folder.receipt.write_text(json.dumps({**envelope, "signatures": []}))
    assert (only_row(home).signature, len(only_row(home).problems)) == ("bad", 2), "nor is it the one in the chain"


def test_an_unsigned_receipt_is_a_warning(home: Home) -> None:
    finished_run(home)
    (home.keys / PRIVATE_NAME).unlink()
    finished_run(home, "owl-07")
    first, second = audit(home).rows
    assert (first.signature, second.signature) == ("ok", "none")
    assert second.problems == ()
    assert "unsigned" in second.warnings[0]


def test_who_names_a_key_is_not_content_with_unsigned_runs(home: Home, tmp_path: Path) -> None:
    """If a key is named, an unsigned run is a problem: anyone could invent a run and say that it had no key."""
    finished_run(home)
    known = (home.keys / PUBLIC_NAME).read_bytes()
    (home.keys / PRIVATE_NAME).unlink()
    finished_run(home, "owl-07")
    signed, unsigned = audit(home, public_key=known).rows
    assert (signed.problems, unsigned.warnings) == ((), ())
    assert (unsigned.signature, len(unsigned.problems)) == ("none", 1)


# Impossible records ---------------------------------------------------------------------------------------------------


FAILED = {"step": "ship", "code": "x", "message": "x", "exit_code": 6}


@pytest.mark.parametrize(
    ("key", "value"),
    [("wall", 1e30), ("wall", 10**400), ("mono", -1e300), ("wall", True), ("event", []), ("event", {"run": "opened"})],
    ids=["far ahead", "beyond any float", "far behind", "no number", "a list", "an object"],
)
@pytest.mark.parametrize("line", [0, -2])
def test_an_impossible_record_is_one_runs_problem_and_stops_none(home: Home, key: str, value: Any, line: int) -> None:
    finished_run(home, "owl-07")
    folder = finished_run(home)
    records = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    records[line][key] = value
    chain_anew(folder.journal, records)
    owl, fox = audit(home, since=0.0).rows
    assert (owl.run, owl.problems) == ("owl-07", ())
    assert re.match(r"journal line \d+ ", fox.problems[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cap_micros", 99_000_000),
        ("data_sha256", "0" * 64),
        ("core_bundle_sha256", "0" * 64),
        ("worst_micros", 1),
        ("max_gpu_hours", 9.0),
        ("recipe", "mini-gpt"),
    ],
)
def test_a_run_that_was_not_opened_with_its_plan(home: Home, key: str, value: Any) -> None:
    """Otherwise a user could raise the cap after the run, and rewrite the journal to fit, up to its receipt."""
    run = CloudRun(home)
    event, data = run.opened()
    run.write((event, {**data, key: value}), run.intended(), run.created())
    run.play(run.through_training(), run.death()).settle()
    assert any(key.partition("_")[0] in problem.lower() for problem in only_row(home).problems)


def test_reads_of_one_moment_do_not_spread_however_long_after(home: Home) -> None:
    """Three readings within 0.2 s prove no death, even if the proof claims 30 s: a list may lack a machine briefly."""
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    *reads, (_, (event, claim)) = run.death(gap_s=0.1)
    run.play(iter(reads))
    run.clock.sleep(30)
    run.write((event, {**claim, "spread_s": 30.0})).settle()
    assert ["30.0 s" in problem for problem in only_row(home).problems] == [True]


def test_a_proof_of_death_is_the_digest_of_its_readings(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    *reads, (_, (event, claim)) = run.death()
    run.play(iter(reads)).write((event, {**claim, "evidence_sha256": "0" * 64})).settle()
    assert ["not the digest of the reads" in problem for problem in only_row(home).problems] == [True]


def test_a_second_machine_before_the_first_is_proven_gone(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created(), run.intended(2))
    assert ["line 4, create.intended" in problem for problem in only_row(home).problems] == [True, True]


def test_an_end_without_a_receipt(home: Home) -> None:
    run = CloudRun(home).until_gone().write((Event.RUN_CLOSED, {"exit_code": 0}))
    assert ["run.closed" in problem for problem in only_row(run.home).problems] == [True]


def test_a_cap_that_was_not_kept_is_a_problem(home: Home) -> None:
    run = CloudRun(home, cap=11_230_000)
    run.write(run.opened(), run.intended(), run.created()).play(run.through_training())
    run.clock.sleep(4 * 3600)
    dies(run, alive_s_ago=5.0)
    run.settle()
    assert ["the cap" in problem for problem in only_row(home).problems] == [True]


def test_a_journal_that_was_torn_and_repaired_is_sound(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    with run.folder.journal.open("ab") as journal:
        journal.write(b'{"boot_id":')
    run.journal = Journal.open(run.folder.journal, run.clock)
    run.play(run.through_training(), run.death()).settle()
    assert audit(home).sound


# After the receipt ---------------------------------------------------------------------------------------------------


LATER = [
    (Event.INCIDENT, {"code": "leftover", "message": "a key is still there"}, "", "a key is still there"),
    (Event.INCIDENT, {"code": "create.late_gone", "message": "x", "id": "pod-2"}, "", ""),
    (Event.INCIDENT, {"code": "create.late", "message": "pod-2", "id": "pod-2"}, "pod-2", ""),
    (Event.INCIDENT, {"code": "leftover", "message": "disk-1", "token": "x", "billed": True}, "disk-1", ""),
    (Event.STEP_FAILED, {**FAILED, "step": "settle"}, "newer", ""),
]


@pytest.mark.parametrize(("event", "data", "problem", "warning"), LATER)
def test_what_is_seen_after_the_receipt_is_judged_by_its_meaning(
    home: Home, event: Event, data: dict[str, Any], problem: str, warning: str
) -> None:
    run = CloudRun(home).until_gone().settle()
    run.write((event, data))
    row = only_row(home)
    assert [problem in one for one in row.problems] == [True] * bool(problem)
    assert [warning in one for one in row.warnings] == [True] * bool(warning)


def test_an_incident_between_the_line_and_its_record_reads_alike(home: Home) -> None:
    """After a crash, or in an older journal, an incident may stand between the chain's line and `receipt.observed`."""
    run = CloudRun(home).until_gone()
    write_receipt(home, run.folder)
    run.write((Event.INCIDENT, {"code": "leftover", "message": "runpod could not be asked"})).settle()
    row = only_row(home)
    assert row.problems == ()
    assert len(row.warnings) == 1


# Machines that may still be billed ------------------------------------------------------------------------------------


def test_what_was_asked_for_and_not_proven_gone_may_be_billing(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended())
    run.clock.sleep(3600)
    run.write((Event.CREATE_UNKNOWN, {"token": run.token, "message": "time-out"}))
    report = audit(home)
    (row,) = report.rows
    assert (row.may_be_billing, row.death, row.verdict, row.seq) == (True, "not seen", "may be billing", None)
    assert row.measured_micros == RATE
    assert report.may_be_billing
    assert report.sound


def test_a_run_before_its_create_or_refused_costs_nothing(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened())
    assert not audit(home).may_be_billing
    run.write(run.intended(), (Event.CREATE_REFUSED, {"token": run.token, "reason": "rejected", "message": ""}))
    row = only_row(home)
    assert (row.may_be_billing, row.death, row.measured_micros) == (False, "none", 0)


def test_damage_to_a_settled_run_is_a_problem_but_not_billing(home: Home) -> None:
    folder = finished_run(home)
    edit_lines(folder.journal, lambda lines: [*lines[:4], b"gone", *lines[5:]])
    row = only_row(home)
    assert row.problems
    assert (row.may_be_billing, row.death, row.chain) == (False, "proven", "bad")
    assert row.is_floor, "what follows the damage cost something too"


def test_a_bad_line_is_named_and_a_good_chain_not_called_broken(home: Home) -> None:
    folder = finished_run(home)
    records = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    records[-1]["data"]["exit_code"] = "none"
    chain_anew(folder.journal, records)
    row = only_row(home)
    (problem,) = row.problems
    assert lacking(problem, f"line {len(records)} ", "exit_code") == []
    assert (row.chain, row.verdict) == ("ok", "does not hold")


def test_a_run_closed_with_a_newer_gpuruns_exit_code_is_sound(home: Home) -> None:
    folder = CloudRun(home).until_gone().settle(exit_code=99).folder
    row, state = only_row(home), replay_journal(folder.name, read_journal(folder.journal).records)
    assert (row.problems, row.warnings, row.chain, state.exit_code) == ((), (), "ok", 99)


@pytest.mark.parametrize("kept", [0, 1, 8, -4])
def test_a_journal_cut_between_two_lines_gives_no_bound(home: Home, kept: int) -> None:
    folder = finished_run(home)
    edit_lines(folder.journal, lambda lines: lines[:kept])
    row = only_row(home)
    assert (row.may_be_billing, row.death, row.chain) == (False, "proven", "bad")
    assert row.is_floor, f"{row.measured_micros} is not what the run has cost"


def test_a_lost_receipt_takes_nothing_from_a_whole_journal(home: Home) -> None:
    finished_run(home).receipt.unlink()
    assert (only_row(home).chain, only_row(home).is_floor) == ("bad", False)


def late(event: str = "create.late") -> tuple[Event, dict[str, Any]]:
    """Return an incident of a machine that appeared after gpurun concluded that it did not exist, or of its end."""
    return Event.INCIDENT, {"code": event, "message": "pod-2", "id": "pod-2", "token": "gr-fox-41-0"}


def test_no_receipt_proves_the_death_of_a_machine_that_came_late(home: Home) -> None:
    """An older gpurun wrote the receipt and closed the run while the late machine lived: the audit must find that."""
    CloudRun(home).until_gone().write(late()).settle(9)
    row = only_row(home)
    assert (row.may_be_billing, row.death) == (True, "not seen")
    assert any("receipt.observed" in problem for problem in row.problems)


def test_a_late_machine_that_is_gone_is_sound_despite_damage(home: Home) -> None:
    folder = CloudRun(home).until_gone().write(late(), late("create.late_gone")).settle().folder
    assert audit(home).sound
    edit_lines(folder.journal, lambda lines: [*lines[:-3], b"gone", *lines[-2:]])
    assert not only_row(home).may_be_billing


@pytest.mark.parametrize(("more", "is_red"), [({}, False), ({"token": "gr-fox-41-0", "billed": True}, True)])
def test_a_leftover_may_be_billing_where_it_is_billed(home: Home, more: dict[str, Any], is_red: bool) -> None:
    run = CloudRun(home).until_gone().write((Event.INCIDENT, {"code": "leftover", "message": "disk-1", **more}))
    assert (only_row(home).may_be_billing, only_row(home).death) == (is_red, "proven")
    run.settle()
    problems = only_row(home).problems
    assert bool(problems) is is_red
    assert read_receipt(home, run.folder).predicate["cost"]["is"] == ("unknown" if is_red else "measured")


@pytest.mark.parametrize("doubt", ["unsigned", "swapped"])
def test_only_a_signed_chained_receipt_vouches_for_a_lost_death(home: Home, doubt: str) -> None:
    folder = finished_run(home)
    edit_lines(folder.journal, lambda lines: [*lines[:4], b"gone", *lines[5:]])
    envelope = json.loads(folder.receipt.read_bytes())
    if doubt == "unsigned":
        folder.receipt.write_text(json.dumps({**envelope, "signatures": []}))
        link = json.loads(home.ledger.read_bytes())
        link["receipt_sha256"] = hashlib.sha256(folder.receipt.read_bytes()).hexdigest()
        home.ledger.write_bytes(canonical(link) + b"\n")
    else:
        folder.receipt.write_text(json.dumps(envelope))
    assert only_row(home).may_be_billing


def test_damage_to_an_unfinished_run_may_hide_a_machine(home: Home) -> None:
    run = CloudRun(home).until_gone()
    edit_lines(run.folder.journal, lambda lines: [*lines[:4], b"gone", *lines[5:]])
    assert only_row(home).may_be_billing


@pytest.mark.parametrize("tail", [b'{"boot_id"', b'{"boot_id":' + bytes(40) + b"}\n"], ids=["cut", "zeros"])
def test_a_torn_line_of_a_run_that_goes_on_is_a_warning(home: Home, tail: bytes) -> None:
    run = CloudRun(home)
    run.write(run.opened())
    with run.folder.journal.open("ab") as journal:
        journal.write(tail)
    row = only_row(home)
    assert (row.problems, len(row.warnings)) == ((), 1)


# What is audited -----------------------------------------------------------------------------------------------------


def test_an_empty_home_is_sound(home: Home) -> None:
    report = audit(home)
    assert (report.rows, report.head, report.receipts, report.sound) == ((), "0" * 64, 0, True)


def test_some_runs_only_but_the_chain_whole(home: Home) -> None:
    for name in ("fox-41", "owl-07"):
        finished_run(home, name)
    assert [row.run for row in audit(home, ["owl-07"]).rows] == ["owl-07"]
    assert [row.run for row in audit(home, since=2e9).rows] == []
    assert [row.run for row in audit(home, since=1e9).rows] == ["fox-41", "owl-07"]
    edit_lines(home.ledger, lambda lines: lines[1:])
    assert audit(home, ["owl-07"]).problems


@pytest.mark.parametrize("settled", [False, True], ids=["before its receipt", "while the chain was read"])
def test_a_run_that_ends_while_others_are_read_is_no_accusation(
    home: Home, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    """An audit of many runs takes minutes. A run that gets its receipt meanwhile must not be reported as a problem."""
    finished_run(home)
    run = CloudRun(home, "owl-07").until_gone()
    late = "chain_lines" if settled else "audit_run"
    real, asked = getattr(audit_room, late), []

    def ends_meanwhile(*what: Any, **how: Any) -> Any:
        found = real(*what, **how)
        asked.append(what)
        if len(asked) == 1:
            run.settle()
        return found

    monkeypatch.setattr(audit_room, late, ends_meanwhile)
    report = audit(home)
    assert [row.problems for row in report.rows] == [(), ()]
    assert report.sound


def test_an_unreadable_journal_keeps_no_other_run_from_its_audit(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fox-41", "owl-07"):
        finished_run(home, name)
    refuse(monkeypatch, home.run("fox-41").journal)
    first, second = audit(home).rows
    assert ["Permission denied" in problem for problem in first.problems] == [True]
    assert (first.chain, first.death, first.is_floor) == ("bad", "proven", True)
    assert second.problems == ()


def test_a_chain_that_cannot_be_read_is_no_empty_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(home)
    refuse(monkeypatch, home.ledger)
    with refusal(SetupError, "ledger.unreadable", "ledger.jsonl", "Permission denied"):
        audit(home)


def refuse(monkeypatch: pytest.MonkeyPatch, forbidden: Path) -> None:
    """Make reading a file fail as if it were another user's, even when the tests run as root."""

    def read(path: Path) -> bytes:
        if path == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_regular(path)

    monkeypatch.setattr("gpurun.ledger.audit.strict_lines.read_regular", read)


def test_it_changes_nothing(home: Home) -> None:
    finished_run(home)
    before = {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()}
    audit(home)
    assert {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()} == before
