"""What `gpurun reap` says of who was asked: a sweep that saw no cloud is no all-clear."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from gpurun.cli.app import build_app
from gpurun.cli.verb import run_app
from gpurun.core.errors import SetupError
from gpurun.providers.local import LocalProvider


def reap(patch: pytest.MonkeyPatch, *words: str) -> int:
    patch.setattr(sys, "argv", ["gpurun", "reap", *words])
    return run_app(build_app("reap"))


def test_a_cron_job_without_its_keys_does_not_look_well(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--exit-code") == 4
    assert "No cloud was asked: there is no key for any here." in capsys.readouterr().err
    assert reap(monkeypatch, "--exit-code", "--json") == 4
    answer = json.loads(capsys.readouterr().out)
    assert (answer["errors"][0]["code"], answer["data"]["asked"]) == ("reap.no_key", ["local"])


def test_a_person_without_keys_is_told_who_was_asked(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch) == 0
    said = capsys.readouterr()
    assert "anywhere that was asked: local." in said.out
    assert "No cloud was asked" in said.err


def test_who_asks_for_this_machine_alone_gets_it(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--provider", "local", "--exit-code") == 0
    assert capsys.readouterr().err == ""


def test_nothing_is_called_clear_where_nobody_could_be_asked(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reap(monkeypatch, "--provider", "runpod") == 9
    assert "Nothing" not in capsys.readouterr().out


def test_nor_where_somebody_did_not_show_what_exists(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(provider: LocalProvider, token: str | None) -> NoReturn:
        raise SetupError("auth.refused", "The key is refused.", hint="Give another.")

    monkeypatch.setattr(LocalProvider, "find", refuses)
    assert reap(monkeypatch) == 9
    said = capsys.readouterr()
    assert "could not be seen at local" in said.err
    assert "Nothing" not in said.out
