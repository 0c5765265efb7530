"""Tests that the audit notices a valid file that does not belong to this run: another journal, another receipt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.shutdown_statement import NAME, Try, read_confirmation, write_confirmation
from gpurun.ledger.write_receipt import read_receipt
from tests.unit.confirm import BoxRun
from tests.unit.ledger_samples import chain_anew, finished_run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def test_a_journal_rewritten_whole_does_not_match_its_receipt(home: Home) -> None:
    folder = finished_run(home)
    records = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    records[0]["data"]["platform"] = "Another machine"
    chain_anew(folder.journal, records)
    (row,) = audit(home).rows
    assert row.chain == "bad"
    assert any("another journal" in problem for problem in row.problems)


def test_one_runs_shutdown_confirms_no_other_on_the_same_box(home: Home) -> None:
    first, second = (BoxRun(home, name).until_gone().settle().folder for name in ("fox-41", "owl-07"))
    tries = [Try(float(at_s), "refused") for at_s in (0, 5, 10)]
    write_confirmation(home, first, read_receipt(home, first), tries, words="", wall=1_800_007_210.0)
    (second.path / NAME).write_bytes((first.path / NAME).read_bytes())
    stolen = read_confirmation(home, second, read_receipt(home, second))
    assert stolen is not None
    assert not stolen.is_seen
    assert "another receipt" in stolen.problem
    genuine = read_confirmation(home, first, read_receipt(home, first))
    assert genuine is not None
    assert genuine.is_seen
    other = next(row for row in audit(home).rows if row.run == "owl-07")
    assert other.death != "shutdown confirmed"
    assert other.problems
