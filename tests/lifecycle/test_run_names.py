"""Tests that a run's name is never used again: the chain of receipts has it even after the run's folder is deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpurun.core.errors import RunHeld
from gpurun.core.paths import Home
from gpurun.ledger import run_name
from gpurun.ledger.run_name import free_name
from tests.lifecycle.tiny_runs import make_run
from tests.refusals import refusal
from tests.unit.ledger_samples import finished_run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with a finished run whose folder was deleted to save disk space.

    The chain still has its receipt.
    """
    home = Home(tmp_path / "home").prepare()
    shutil.rmtree(finished_run(home, "fox-41").path)
    return home


def test_a_second_run_of_a_name_is_refused_before_it_costs(home: Home) -> None:
    """A second run of this name would be paid for but get no receipt, because the chain already has one."""
    with refusal(RunHeld, "run.name_taken", "fox-41", "folder") as refused:
        make_run(home, "fox-41")
    assert "--name" in refused.value.hint
    assert not home.run("fox-41").path.exists()
    make_run(home, "fox-42")


def test_a_name_that_is_taken_shows_the_run_that_has_it(home: Home) -> None:
    finished_run(home, "owl-07")
    with refusal(RunHeld, "run.name_taken", "owl-07") as refused:
        make_run(home, "owl-07")
    assert "gpurun attach owl-07" in refused.value.hint


def test_no_name_is_drawn_twice(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(home, "fox-40")
    numbers = iter((31, 30, 29))  # fox-41 has a receipt, and fox-40 has a folder.
    monkeypatch.setattr(run_name.secrets, "choice", lambda animals: "fox")
    monkeypatch.setattr(run_name.secrets, "randbelow", lambda most: next(numbers))
    assert free_name(home) == "fox-39"


def test_where_every_short_name_is_taken_a_longer_one_is_found(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10, 100):
        home.run(f"fox-{number}").path.mkdir()
    monkeypatch.setattr(run_name.secrets, "choice", lambda animals: "fox")
    assert int(free_name(home).removeprefix("fox-")) >= 100


def test_a_chain_that_is_damaged_keeps_nobody_from_beginning(home: Home) -> None:
    home.ledger.write_bytes(b"\xff\n" + home.ledger.read_bytes())
    make_run(home, "fox-42")
