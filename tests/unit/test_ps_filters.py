"""Tests of the filters of `gpurun ps`: a run that may still cost money is always listed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.paths import Home
from tests.unit.ledger_samples import CloudRun, finished_run


@pytest.fixture
def listed(own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that returns the names of the runs that `ps --all` lists with these words."""
    home = Home(own_home).prepare()
    finished_run(home)
    lost = CloudRun(home, "elk-42")
    lost.write(lost.opened(), lost.intended(), lost.created())

    def run(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["gpurun", "ps", "--all", *words, "--json"])
        run_app(build_app())
        return [row["run"] for row in json.loads(capsys.readouterr().out)["data"]["runs"]]

    return run


def test_runs_are_listed_by_recipe_and_by_the_day_they_began(listed: Any) -> None:
    assert sorted(listed()) == sorted(listed("--recipe", "gpt2-124m", "--since", "2001-01-01")) == ["elk-42", "fox-41"]


@pytest.mark.parametrize("words", [("--recipe", "mini-gpt"), ("--since", "2099-01-01")])
def test_what_may_be_billing_is_listed_whatever_was_asked_for(listed: Any, words: tuple[str, str]) -> None:
    assert listed(*words) == ["elk-42"]
