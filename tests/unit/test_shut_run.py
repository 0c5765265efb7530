"""Tests of a run folder that belongs to another user (`sudo gpurun train`): it is reported, and other runs work."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.core.errors import SetupError
from gpurun.core.paths import Home
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.reaper import _is_open_run
from tests.lifecycle.tiny_runs import make_run
from tests.refusals import lacking, refusal


@pytest.fixture
def shut(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Return a home with our own run owl-7, and with fox-41, whose folder is unreadable even for root."""
    home = Home(own_home)
    make_run(home, "owl-7")
    folder = str(make_run(home, "fox-41").path)

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *given: Any, **named: Any) -> Any:
            if str(path).startswith(f"{folder}/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *given, **named)

        return refuse

    monkeypatch.setattr(os, "open", refusing(os.open))
    for name in ("stat", "open", "exists", "is_file"):
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    return home


def type_line(words: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    """Run a verb with --json; return its exit code, its data and the text of its errors."""
    patch.setattr(sys, "argv", ["gpurun", *words.split(), "--json"])
    code = run_app(build_app())
    answer = json.loads(capsys.readouterr().out)
    return code, answer["data"], str(answer["errors"])


def test_ps_lists_the_others_and_names_it(
    shut: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, errors = type_line("ps", monkeypatch, capsys)
    assert [run["run"] for run in data["runs"]] == ["owl-7"]
    assert lacking(errors, "fox-41/journal.jsonl", "Permission denied") == []
    assert code == 4


def test_the_doctor_does_not_call_it_finished(
    shut: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, _ = type_line("doctor", monkeypatch, capsys)
    found = [finding["text"] for finding in data["findings"] if finding["level"] == "bad"]
    assert lacking("".join(found), "fox-41/journal.jsonl", "Permission denied", "owl-7") == []
    assert code == 4


def test_reap_goes_on_asking(shut: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, data, errors = type_line("reap", monkeypatch, capsys)
    assert (code, data["asked"], errors) == (0, ["local"], "[]")
    assert not _is_open_run("fox-41", "gr-fox-41-00000000", shut)


def test_the_audit_calls_its_journal_a_problem_and_goes_on(
    shut: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, _ = type_line("audit", monkeypatch, capsys)
    assert "Permission denied" in str(data)
    assert code == 10


@pytest.mark.parametrize("words", ["attach fox-41", "stop fox-41", "destroy fox-41 --yes", "logs fox-41"])
def test_a_verb_about_it_says_why_not(
    words: str, shut: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = type_line(words, monkeypatch, capsys)
    assert "journal.unreadable" in errors
    assert code == 4


def test_a_verb_about_another_run_does_not_notice(
    shut: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = type_line("logs owl-7", monkeypatch, capsys)
    assert (code, errors) == (0, "[]")


def test_its_receipt_cannot_be_read(shut: Home) -> None:
    with refusal(SetupError, "receipt.shut", "receipt.json", "Permission denied"):
        read_receipt(shut, shut.run("fox-41"))
