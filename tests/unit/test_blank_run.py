"""An empty RUN names no run: a script whose variable is not set must not end the only one there is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app
from gpurun.cli.verb import run_app
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


@pytest.mark.parametrize("blank", ["", "  "], ids=["empty", "spaces"])
@pytest.mark.parametrize("words", VERBS, ids=[words[0] for words in VERBS])
def test_an_empty_name_is_refused_though_there_is_but_one_run(
    words: list[str], blank: str, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = make_run(Home(own_home), "fox-41")
    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", never_starts)
    place = [str(own_home / "copy")] if words[0] == "export" else []
    monkeypatch.setattr(sys, "argv", ["gpurun", *words, blank, *place, "--json"])
    assert run_app(build_app(words[0])) == 2
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [error["code"] for error in answer["errors"]] == ["run.blank"]
    assert not only.control.exists()


def never_starts(*given: object) -> None:
    pytest.fail("a supervisor was started for a run that nobody named")
