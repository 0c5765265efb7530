"""Tests that an empty value, as from an unset shell variable, is refused, and never taken for a default."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.paths import Home
from tests.lifecycle.tiny_runs import make_run

VERBS = [
    ["stop"],
    ["resume"],
    ["collect"],
    ["destroy", "--yes"],
    ["attach"],
    ["logs"],
    ["receipt"],
    ["audit"],
    ["report"],
    ["confirm-shutdown"],
    ["sample", "--prompt", "def "],
    ["export", "--to", "hf"],
    ["train", "--yes", "--from"],
]

FLAGS = [
    ["train", "--yes"],
    ["train", "mini-gpt", "--yes", "--gpu"],
    ["train", "mini-gpt", "--yes", "--region"],
    ["train", "mini-gpt", "--yes", "--data"],
    ["plan", "mini-gpt", "--max-cost"],
    ["offers", "--max-price"],
    ["reap", "--destroy", "--older-than"],
    ["audit", "--key"],
    ["recipes", "show"],
    ["ps", "--home"],
]


@pytest.mark.parametrize("blank", ["", "  "], ids=["empty", "spaces"])
@pytest.mark.parametrize("words", VERBS, ids=[words[0] for words in VERBS])
def test_an_empty_name_is_refused_though_there_is_but_one_run(
    words: list[str], blank: str, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = make_run(Home(own_home), "fox-41")
    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", never_starts)
    place = [str(own_home / "copy")] if words[0] == "export" else []
    monkeypatch.setattr(sys, "argv", ["gpurun", *words, blank, *place, "--json"])
    assert run_app(build_app()) == 2
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [error["code"] for error in answer["errors"]] == ["run.blank"]
    assert not only.control.exists()


@pytest.mark.parametrize("blank", ["", "  "], ids=["empty", "spaces"])
@pytest.mark.parametrize("words", FLAGS, ids=" ".join)
def test_an_empty_value_is_refused_and_never_means_the_default(
    words: list[str], blank: str, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpurun", *words, blank, "--json"])
    assert run_app(build_app()) == 2
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    named = words[-1] if words[-1] not in ("--yes", "show") else "RECIPE"
    assert [(error["code"], error["message"]) for error in answer["errors"]] == [("usage.blank", f"{named} is empty.")]


def never_starts(*given: object) -> None:
    pytest.fail("a supervisor was started for a run that nobody named")
