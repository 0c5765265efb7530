"""Tests of `gpurun rm`: which files it deletes, which it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.session import Session
from gpurun.core.paths import Home
from gpurun.lifecycle.artifacts import removal
from tests.unit.ledger_samples import CloudRun, finished_run


@pytest.fixture
def home(own_home: Path) -> Home:
    home = Home(own_home).prepare()
    finished_run(home)
    return home


def kept(home: Home) -> dict[str, bytes]:
    folder = home.run("fox-41")
    return {path.name: path.read_bytes() for path in (folder.journal, folder.receipt, folder.events, folder.plan)}


def test_what_came_home_goes_and_the_run_is_audited_as_before(home: Home, gpurun: Any) -> None:
    before = kept(home)
    size = sum(path.stat().st_size for path in home.run("fox-41").artifacts.rglob("*") if path.is_file())
    code, out, _ = gpurun("rm", "fox-41", "--with-checkpoints", "--json")
    assert (code, json.loads(out)["data"]["removed"]) == (0, [{"run": "fox-41", "files": 3, "bytes": size}])
    assert not home.run("fox-41").artifacts.exists()
    assert kept(home) == before
    code, out, _ = gpurun("audit", "--json")
    (row,) = json.loads(out)["data"]["rows"]
    assert (code, row["problems"]) == (0, [])
    assert any("3 files" in warning for warning in row["warnings"])
    code, out, _ = gpurun("rm", "fox-41", "--json")
    assert (code, json.loads(out)["data"]["removed"]) == (0, [{"run": "fox-41", "files": 0, "bytes": 0}])


@pytest.mark.parametrize(("typed", "is_gone"), [("fox-41", True), ("yes", False), ("", False)])
def test_an_only_copy_goes_once_the_runs_name_is_typed(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch, typed: str, is_gone: bool
) -> None:
    assert gpurun("rm", "fox-41")[0] == 2, "nobody can answer"
    assert home.run("fox-41").artifacts.exists()
    monkeypatch.setattr(Session, "ask", lambda session, question, flag: typed)
    assert gpurun("rm", "fox-41")[0] == (0 if is_gone else 2)
    assert home.run("fox-41").artifacts.exists() is not is_gone


def test_a_machine_that_is_not_proven_gone_keeps_all_of_its_run(home: Home, gpurun: Any) -> None:
    run = CloudRun(home, "elk-42")
    run.write(run.opened(), run.intended(), run.created())
    code, _, err = gpurun("rm", "fox-41", "elk-42", "--with-checkpoints")
    assert (code, "rm.unfinished" in err, "elk-42" in err) == (2, True, True)
    assert home.run("fox-41").artifacts.exists(), "the others are not touched either"


def test_a_run_that_another_goes_on_from_stays_until_its_end(home: Home, gpurun: Any) -> None:
    earlier = {"run": "fox-41", "step": 120, "bytes": 700, "receipt_sha256": "a" * 64}

    class Later(CloudRun):
        def opened(self) -> Any:
            event, data = super().opened()
            return event, {**data, "continues": earlier}

    later = Later(home, "elk-42")
    later.write(later.opened(), later.intended(), later.created())
    code, _, err = gpurun("rm", "fox-41", "--with-checkpoints")
    assert (code, "rm.needed" in err, "elk-42" in err) == (2, True, True)


def test_a_folder_that_is_a_link_is_left_to_its_user(home: Home, gpurun: Any, tmp_path: Path) -> None:
    folder = home.run("fox-41")
    folder.artifacts.rename(tmp_path / "elsewhere")
    folder.artifacts.symlink_to(tmp_path / "elsewhere")
    assert gpurun("rm", "fox-41", "--with-checkpoints")[0] == 2
    assert len(list((tmp_path / "elsewhere").rglob("*.*"))) == 3


def test_what_was_cut_short_is_finished_by_a_second_call(
    home: Home, gpurun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(removal.shutil, "rmtree", lambda place: (_ for _ in ()).throw(OSError(30, "Read-only")))
        assert gpurun("rm", "fox-41", "--with-checkpoints")[0] != 0
    assert gpurun("rm", "fox-41", "--with-checkpoints")[0] == 0
    assert not home.run("fox-41").artifacts.exists()
