"""Tests of a home with many finished runs: gpurun replays only open runs, and misses none that may be billed."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.clock import SystemClock
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home, read_regular
from gpurun.ledger import audit as audit_room
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import Journal
from tests.many_runs import many_runs
from tests.refusals import lacking
from tests.unit.ledger_samples import chain_anew, edit_lines

CLOSED, OPEN = 60, {"open-0", "open-1"}
RUN = "run-00007"
Types = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return many_runs(tmp_path_factory.mktemp("many"), CLOSED, len(OPEN))


@pytest.fixture
def home(made: Home, own_home: Path) -> Home:
    shutil.copytree(made.root, own_home, dirs_exist_ok=True)
    return Home(own_home)


@pytest.fixture
def finished(home: Home) -> Home:
    """Return the home without its open runs."""
    for name in OPEN:
        shutil.rmtree(home.run(name).path)
    return home


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Types:
    """Return a function that runs a command line and returns its exit code and its output."""

    def run(words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpurun", *words.split()])
        code = run_app(build_app())
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("ps", OPEN), ("doctor", OPEN), ("reap --provider local", OPEN), ("plan mini-gpt", OPEN),
        ("plan mini-gpt --json", set()), (f"logs {RUN} --json", {RUN}), ("receipt run-0000 --json", set()),
        ("report @last --json", {f"run-{CLOSED - 1:05d}"}),
    ],
)  # fmt: skip
def test_no_journal_is_read_but_those_that_a_verb_is_about(
    words: str, runs: set[str], home: Home, types: Types, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb must read only the journals that it needs.

    Reading all journals of ten thousand runs takes five seconds and 760 MB.
    """
    read = list[str]()

    def reading(path: Path) -> bytes:
        read.append(path.parent.name)
        return read_regular(path)

    monkeypatch.setattr("gpurun.ledger.journal.read_regular", reading)
    types(words)
    assert set(read) == runs


def test_ps_counts_what_is_finished_and_lists_it_when_asked(finished: Home, types: Types) -> None:
    code, text = types("ps")
    assert (code, lacking(text, f"{CLOSED} ", "gpurun ps --all")) == (0, [])
    code, said = types("ps --all --json")
    rows = json.loads(said)["data"]["runs"]
    assert (code, [row["run"] for row in rows]) == (0, [f"run-{number:05d}" for number in range(CLOSED)])
    assert {(row["phase"], row["exit_code"], row["damage"]) for row in rows} == {("closed", 0, None)}


def found_late(home: Home) -> None:
    """Append to a closed run's journal that another machine of the run has appeared."""
    late = {"code": "create.late", "message": "A machine showed itself.", "id": "m-2", "token": "gr-run-00007-7f3a91"}
    Journal.open(home.run(RUN).journal, SystemClock()).write(Event.INCIDENT, late)


def closed_red(home: Home) -> None:
    """Change the journal into one that an older gpurun closed with exit code 9 while a machine lived."""
    records = [json.loads(line) for line in home.run(RUN).journal.read_bytes().splitlines()]
    late = {"code": "create.late", "message": "A machine showed itself.", "id": "m-2", "token": "gr-run-00007-7f3a91"}
    records.insert(-1, {**records[-1], "event": "incident", "data": late})
    records[-1]["data"]["exit_code"] = 9
    chain_anew(home.run(RUN).journal, records)


def begins_again(home: Home) -> None:
    """Cut the journal back to the start of training, as if an old copy had been restored."""
    edit_lines(home.run(RUN).journal, lambda lines: lines[: [b"train.started" in row for row in lines].index(True) + 1])


@pytest.mark.parametrize("happens", [found_late, closed_red, begins_again])
def test_a_closed_run_that_may_still_be_billed_is_red_everywhere(
    happens: Callable[[Home], None], finished: Home, types: Types
) -> None:
    happens(finished)
    for words in ("ps --json", "doctor --json", "reap --provider ssh --json"):
        code, said = types(words)
        assert (code, RUN in said) == (9, True), (words, said)


@pytest.mark.parametrize("cut", [1, 20, 400], ids=["its line end", "its closing line's end", "all of that line"])
def test_a_journal_whose_closing_line_is_torn_is_not_closed(cut: int, finished: Home, types: Types) -> None:
    journal = finished.run(RUN).journal
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert not finished.run(RUN).is_closed
    (row,) = json.loads(types("ps --json")[1])["data"]["runs"]
    assert (row["run"], row["phase"] in ("gone", "settled"), row["owner"]) == (RUN, True, None)


@pytest.mark.parametrize(
    "rest", [b"\0" * 300, b"\0\n", b'{"seq":', b"\n"], ids=["zeros", "a line of zeros", "half a line", "an empty line"]
)
def test_a_closing_line_that_something_follows_is_no_last_line(rest: bytes, finished: Home) -> None:
    with finished.run(RUN).journal.open("ab") as journal:
        journal.write(rest)
    assert not finished.run(RUN).is_closed


def test_forgery_before_the_closing_line_is_left_to_the_audit(finished: Home, types: Types) -> None:
    edit_lines(finished.run(RUN).journal, lambda lines: [*lines[:5], *lines[6:]])
    assert types("ps")[0] == 0
    code, said = types("audit")
    assert (code, lacking(said, RUN, "line 6", "number 7")) == (10, []), said


@pytest.mark.parametrize("chained", [True, False])
def test_the_audit_has_one_journal_in_memory_at_a_time(
    chained: bool, finished: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read, most = audit_room.journal_lines, list[weakref.ref[Any]](), list[int]()

    def reading(path: Path) -> Any:
        most.append(sum(ref() is not None for ref in read))
        lines = real(path)
        read.append(weakref.ref(lines))
        return lines

    monkeypatch.setattr(audit_room, "journal_lines", reading)
    if not chained:
        finished.ledger.unlink()
    assert len(audit(finished).rows) == len(read) == CLOSED
    assert max(most) <= 1
