"""Tests of a command that writes more files than a receipt names, with difficult names, and is then continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.any_names import NASTY, below, possible, script
from tests.lifecycle.commands_here import Person

MANY = 1_100


@pytest.fixture
def person(own_home: Path, tmp_path: Path) -> Person:
    return Person(own_home, tmp_path / "lab")


def test_more_files_than_a_receipt_names_are_all_held_by_it(person: Person) -> None:
    """The receipt names only the first thousand files. The digest of a list of all files covers the others."""
    files = possible([*NASTY, *(b"frames/img %04d.png" % number for number in range(MANY))])
    (person.folder / "train.py").write_text(script(files))
    done = person.runs(
        "--checkpoint-glob", "runs/*/model.pt", "--resume-arg", "--resume {}", "--", "python", "train.py"
    )
    assert done.returncode == 0, done.stderr
    artifacts = person.home / "runs/fox-41/artifacts"
    assert below(artifacts / "outputs") == files
    checkpoint = person.receipt()["checkpoint"]
    assert (len(checkpoint["files"]), checkpoint["listed"]["files"], checkpoint["missing"]) == (1000, len(files), [])
    assert checkpoint["files"][0]["kind"] == "checkpoint"
    subjects = json.loads(person.types("receipt", "fox-41", "--json").stdout)["data"]["statement"]["subject"]
    assert {"name": "collected.list", "digest": {"sha256": checkpoint["listed"]["sha256"]}} in subjects
    assert max(map(len, (person.home / "runs/fox-41/journal.jsonl").read_bytes().splitlines())) < 1 << 20
    assert person.holds()
    shown = person.types("receipt", "fox-41").stdout
    assert "runs/2026-11-27 00:41:05/model.pt" in shown
    assert "\x1b" not in shown
    collected = person.types("collect", "fox-41", "--only", "all", "--to", str(person.home.parent / "copy"))
    assert collected.returncode == 0, collected.stderr
    assert below(person.home.parent / "copy" / "outputs") == files

    saves = "import pathlib, sys; print(sys.argv); pathlib.Path(sys.argv[-1]).write_bytes(b'more')"
    again = person.runs("--from", "fox-41", "--", "python", "-c", saves, name="fox-42")
    assert again.returncode == 0, again.stderr
    log = (person.home / "runs/fox-42/run.log").read_text()
    assert "'--resume', 'runs/2026-11-27 00:41:05/model.pt'" in log

    last = artifacts / "outputs/frames/img 1099.png"
    last.write_bytes(b"another one")
    assert "img%201099.png " in person.types("audit", "fox-41").stdout
    last.write_bytes(files[b"frames/img 1099.png"])
    listed = person.home / "runs/fox-41/collected.list"
    listed.write_text(listed.read_text().replace("1099", "1098"))
    assert "collected.list" in person.types("audit", "fox-41").stdout
