"""Tests that receipts of older rules are not called forgeries, and that a forger gains nothing by declaring such rules.

Each archive in `homes_of_rules_1/` is a home that commit 333d4db wrote: a command and a training on this machine, a
price that rose, an end by the machine's own timer, a job that Slurm lost, and a command with a `--setup` script on
RunPod's emulator. Commit 7e772b8 wrote the homes in `homes_of_rules_2/`: a job that Slurm lost, whose folder was read
long after its end, and a start that failed on AWS. Commit dfc847c wrote those in `homes_of_rules_3/`: a cap that was
called broken without evidence, an end that was not observed, and a training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core import receipt_rules
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, RunFolder
from gpurun.core.receipt_rules import RULES
from gpurun.ledger import log_facts, statement
from gpurun.ledger.audit import AuditRow, audit
from gpurun.ledger.write_receipt import read_receipt
from gpurun.readers.evidence.class_check import check_class
from tests.refusals import lacking
from tests.unit.ledger_samples import CloudRun, Note, finished_run, forge_statement
from tests.unit.other_rules import HOMES, unpacked

NOTE = "rules 1"
NOT_RUNPOD = "http://127.0.0.1:41557"
# What the audit of 333d4db found for each archive, and one fact from each of its warnings. The exception is "rise",
# which that audit called a forgery because of its own rounding.
SAID: dict[str, tuple[str, str, str, int, tuple[str, ...]]] = {
    "command": ("smoke", "proven", "1/1", 0, ()),
    "trained": ("smoke", "proven", "7/7", 0, ()),
    "rise": ("gpu, rented", "proven", "3/3", 75_557, ()),
    "timer": ("smoke", "proven", "0/0", 558_135, ()),
    "slurm-lost": ("smoke", "proven", "3/3", 100_000, ()),
    "phases": ("not a provider", "proven", "1/1", 3_658, (NOT_RUNPOD,)),
}


def only_row(home: Home) -> AuditRow:
    (row,) = audit(home).rows
    return row


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


@pytest.mark.parametrize("kind", SAID)
def test_an_older_home_audits_as_it_did_and_is_not_changed(kind: str, tmp_path: Path) -> None:
    home = unpacked(kind, tmp_path)
    before = {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()}
    report = audit(home)
    (row,) = report.rows
    verdict, death, files, micros, warnings = SAID[kind]
    assert (row.problems, report.problems, row.chain, row.signature) == ((), (), "ok", "ok")
    assert (row.verdict, row.death, row.files, row.measured_micros) == (verdict, death, files, micros)
    assert (row.may_be_billing, row.is_floor) == (False, False)
    facts = (NOTE, *warnings)
    assert [fact in warning for fact, warning in zip(facts, row.warnings, strict=True)] == [True] * len(facts)
    assert {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()} == before


# The upper bound in micro-dollars that was signed by rules 2, and the one that today's rules compute.
SIGNED_BY_2 = {"slurm-lost": (190_000, 70_000), "failed-start": (1_113_589, 33_589)}


@pytest.mark.parametrize("kind", SIGNED_BY_2)
def test_a_rules_2_receipt_signed_too_high_holds_with_a_remark(kind: str, tmp_path: Path) -> None:
    home = unpacked(kind, tmp_path, HOMES.with_name("homes_of_rules_2"))
    row, (signed, today) = only_row(home), SIGNED_BY_2[kind]
    assert read_receipt(home, home.run("fox-41")).predicate["cost"]["upper_bound_micros"] == signed
    assert (row.problems, row.chain, row.signature, row.measured_micros) == ((), "ok", "ok", today)
    (note,) = row.warnings
    assert lacking(note, "rules 2", f"rules {RULES}: cost.") == []


SIGNED_BY_3 = {
    "doubted": (433_334, False),
    "unseen": (4_033_334, None),
    "finished": (57_109, True),
}


@pytest.mark.parametrize("kind", SIGNED_BY_3)
def test_a_rules_3_receipt_keeps_its_own_verdict_on_the_cap(kind: str, tmp_path: Path) -> None:
    home = unpacked(kind, tmp_path, HOMES.with_name("homes_of_rules_3"))
    micros, kept = SIGNED_BY_3[kind]
    cost = read_receipt(home, home.run("fox-41")).predicate["cost"]
    assert (cost["upper_bound_micros"], cost["cap_kept"]) == (micros, kept)
    row = only_row(home)
    assert (len(row.problems), row.chain, row.signature) == (int(kept is False), "ok", "ok")
    assert row.measured_micros == micros
    assert ["rules 3" in warning for warning in row.warnings] == [True]


def types(home: Home, *words: str) -> int:
    """Run one gpurun command line in a home, and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpurun", *words, "--home", str(home.root)])
        return run_app(build_app())


def test_strict_counts_that_a_receipt_is_of_other_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = unpacked("trained", tmp_path)
    for words, expected in ((["audit"], 0), (["audit", "--strict"], 10)):
        assert types(home, *words) == expected
        assert NOTE in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["trained", "command"])
def test_a_class_check_shows_that_a_card_is_of_other_rules(kind: str, tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    cards.mkdir()
    assert types(unpacked(kind, tmp_path), "evidence", "fox-41", "-o", str(cards / "card.zip")) == 0
    (row,) = check_class([cards / "card.zip"], None)
    assert (row.problems, row.verdict) == ([], "smoke")
    assert any(NOTE in note for note in row.notes)


# Changed wording ------------------------------------------------------------------------------------------------------


def sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every sentence that a receipt may contain by another one."""
    for module in (log_facts, statement):
        for name, value in vars(module).items():
            if name.endswith("_SENTENCE") or name == "NOT_OBSERVED":
                monkeypatch.setattr(module, name, f"in other words: {value}")
    monkeypatch.setattr(log_facts, "_NOT_SHOWN", dict.fromkeys(log_facts._NOT_SHOWN, "something else"))
    monkeypatch.setattr(statement, "cost_says", lambda _: "some other words")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_receipt_holds_if_only_todays_wording_differs(
    home: Home, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of one word in a sentence once made every receipt signed before it a forgery."""
    finished_run(home, device=device)
    sentences(monkeypatch)
    assert (only_row(home).problems, only_row(home).warnings) == ((), ())


def test_every_receipt_text_is_a_code_a_quotation_or_uncompared(home: Home, tmp_path: Path) -> None:
    """Each text in a receipt is a fixed code, a quotation from the run's files, or a wording that is not compared."""
    codes = {*log_facts._NOT_SHOWN, "its own timer", "the provider's bill"}
    homes = [home, *(unpacked(kind, tmp_path) for kind in SAID)]
    finished_run(home)
    for one in homes:
        folder = one.run("fox-41")
        files = (folder.journal, folder.plan, folder.log, folder.events)
        texts = [path.read_text() for path in files if path.exists()]
        for path, value in leaves(read_receipt(one, folder).statement):
            is_of_model = path.startswith("predicate.sample.")
            if isinstance(value, str) and " " in value and path not in receipt_rules.WORDS and not is_of_model:
                quoted = json.dumps(value)[1:-1]
                assert value in codes or any(quoted in text or value in text for text in texts), (path, value)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and path not in receipt_rules.WORDS:
        for below in value:
            yield from leaves(below, f"{path}[]")
    else:
        yield path, value


# Receipts that declare other rules ------------------------------------------------------------------------------------


class OlderRun(CloudRun):
    """The same run as a gpurun without rules would record it; a subclass may declare the number of its rules."""

    rules: int | None = None

    def opened(self) -> Note:
        event, data = super().opened()
        return event, {key: value for key, value in data.items() if key != "rules"} | (
            {} if self.rules is None else {"rules": self.rules}
        )


class NewerRun(OlderRun):
    """The same run under the rules of a future gpurun."""

    rules = RULES + 1


def settled(home: Home, kind: type[CloudRun] = OlderRun) -> RunFolder:
    return kind(home).until_gone().settle().folder


@pytest.mark.parametrize(("kind", "number"), [(OlderRun, 1), (NewerRun, RULES + 1)])
def test_other_rules_are_a_note_and_no_problem(home: Home, kind: type[CloudRun], number: int) -> None:
    settled(home, kind)
    row = only_row(home)
    assert (row.problems, [f"rules {number}," in warning for warning in row.warnings]) == ((), [True])


def test_a_receipt_of_other_rules_than_its_run_is_a_problem(home: Home) -> None:
    folder = finished_run(home)
    forge_statement(home, folder, lambda payload: without(payload, "rules"))
    assert only_row(home).problems != ()


def without(payload: Any, key: str) -> Any:
    del payload["predicate"][key]
    return payload


def put(path: str, value: Any) -> Callable[[Any], Any]:
    """Return an edit that sets one place of a predicate to a value.

    A function as the value is called with the old value.
    """

    def edit(payload: Any) -> Any:
        *keys, last = path.split(".")
        inner = payload["predicate"]
        for key in keys:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value(inner[last]) if callable(value) else value
        return payload

    return edit


def cheaper(payload: Any) -> Any:
    """Halve the rental's cost and the total in the receipt."""
    line, cost = payload["predicate"]["cost"]["rentals"][0], payload["predicate"]["cost"]
    line["micros"] = cost["upper_bound_micros"] = line["micros"] // 2
    return payload


def quicker(payload: Any) -> Any:
    """Claim that the machine lived for one minute, with all sums made to fit."""
    cost, runtime = payload["predicate"]["cost"], payload["predicate"]["runtime"]
    line = cost["rentals"][0]
    line["billable_s"] = runtime["billable_s"] = 60.0
    line["micros"] = cost["upper_bound_micros"] = line["rate_micros_per_hour"] * 60 // 3600
    runtime["phases_s"] = {"other": 60.0}
    runtime["training"]["seconds"] = None
    return payload


def slower_rate(payload: Any) -> Any:
    """Claim a price of one cent per hour, with all sums made to fit."""
    cost = payload["predicate"]["cost"]
    line = cost["rentals"][0]
    line["rate_micros_per_hour"] = 10_000
    line["micros"] = cost["upper_bound_micros"] = -(-10_000 * 57 * 60 // 3600)
    return payload


FORGED: dict[str, tuple[type[CloudRun], Callable[[Any], Any]]] = {
    "a cost that is no sum": (OlderRun, put("cost.upper_bound_micros", lambda micros: micros // 2)),
    "a cost that is not its time": (OlderRun, cheaper),
    "a time in which it was seen alive": (OlderRun, quicker),
    "a rate below the agreed one": (OlderRun, slower_rate),
    "a cap of its own": (OlderRun, put("cost.cap_micros", 99_000_000)),
    "no rental": (OlderRun, put("cost.rentals", [])),
    "fewer reads": (OlderRun, put("teardown.evidence", [])),
    "another end": (OlderRun, put("teardown.is", "user_operated")),
    "another digest": (OlderRun, put("digests.events.sha256", "0" * 64)),
    "another file": (OlderRun, put("checkpoint.files.0.sha256", "0" * 64)),
    "another subject": (OlderRun, lambda body: {**body, "subject": [{"name": "x", "digest": {"sha256": "0" * 64}}]}),
    "another loss": (OlderRun, put("training.figures.last_loss", 0.1)),
    "another start": (OlderRun, put("timeline.asked", "2020-01-01T00:00:00Z")),
    "by rules that nobody knows": (NewerRun, put("cost.upper_bound_micros", lambda micros: micros // 2)),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_is_forged_under_other_rules_is_a_problem(what: str, home: Home) -> None:
    kind, edit = FORGED[what]
    forge_statement(home, settled(home, kind), edit)
    row = only_row(home)
    assert row.problems, row
    assert row.verdict == "does not hold"


def test_a_gpu_that_is_claimed_under_other_rules_is_a_problem(home: Home) -> None:
    folder = OlderRun(home, device="cpu").until_gone().settle().folder
    forge_statement(home, folder, put("verdict.is", "gpu, rented"))
    row = only_row(home)
    assert any("verdict.is" in problem for problem in row.problems), row


def test_an_unrecorded_death_is_a_problem_under_other_rules(home: Home) -> None:
    run = OlderRun(home)
    run.write(run.opened(), run.intended())
    run.clock.sleep(3)
    run.write(run.created()).play(run.through_training())
    run.settle()
    forge_statement(home, run.folder, put("teardown.is", "destroyed"))
    row = only_row(home)
    assert row.may_be_billing
    assert any("teardown.is" in problem for problem in row.problems), row


def test_every_edit_under_other_rules_is_named(home: Home) -> None:
    """Every edit must cause a problem or change a warning, except in wordings that the audit does not compare."""
    folder = settled(home)
    kept = {path: path.read_bytes() for path in (folder.receipt, folder.journal, home.ledger)}
    unedited, unseen = only_row(home).warnings, []
    for path in all_paths(read_receipt(home, folder).statement["predicate"]):
        forge_statement(home, folder, put(path, another))
        row = only_row(home)
        if not row.problems and row.warnings == unedited:
            unseen.append("predicate." + ".".join("[]" if key.isdigit() else key for key in path.split(".")))
        for file, content in kept.items():
            file.write_bytes(content)
    assert {path.replace(".[]", "[]") for path in unseen} <= receipt_rules.WORDS


def all_paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from all_paths(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for place, below in enumerate(value):
            yield from all_paths(below, f"{path}.{place}")
    else:
        yield path


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}0"
    return [{"made": "up"}]


def test_a_runs_rules_are_in_its_opening_and_its_receipt(home: Home) -> None:
    folder = finished_run(home)
    opened = json.loads(folder.journal.read_bytes().splitlines()[0])
    assert (opened["event"], opened["data"]["rules"]) == (Event.RUN_OPENED, RULES)
    assert read_receipt(home, folder).predicate["rules"] == RULES
