"""Tests that a verb answers thousands of broken records with a sentence, never a traceback, in bounded time and memory.

When a value inside a record is changed, the chain or envelope around it is made again, so that a verb reads all of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import canonical
from tests.security.fuzz import altered, check, many, plain, torn
from tests.unit.report_samples import finished_run, opened_run


def alter_journal(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    """Alter one random record and chain the lines after it again; return the journal's path and new content."""
    lines = [json.loads(line) for line in folder.journal.read_bytes().splitlines()]
    place = by.randrange(len(lines))
    lines[place] = {**lines[place], "data": altered(lines[place]["data"], by)}
    before, made = "0" * 64, list[bytes]()
    for line in lines:
        try:
            content = canonical({**line, "prev": before})
        except (ValueError, UnicodeEncodeError):
            content = plain({**line, "prev": before})
        made.append(content)
        before = hashlib.sha256(content).hexdigest()
    return folder.journal, b"\n".join([*made, b""])


def receipt(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    """Return the receipt's path, and its content altered as a person without the key can alter it."""
    envelope = json.loads(folder.receipt.read_bytes())
    if by.random() < 0.3:
        return folder.receipt, plain(altered(envelope, by))
    statement = altered(json.loads(base64.b64decode(envelope["payload"])), by)
    return folder.receipt, plain(envelope | {"payload": base64.b64encode(plain(statement)).decode()})


def events(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    """Return the path of the trainer's events, and their content with one event altered."""
    lines = folder.events.read_bytes().splitlines()
    place = by.randrange(len(lines))
    lines[place] = plain(altered(json.loads(lines[place]), by))
    return folder.events, b"\n".join([*lines, b""])


def plan(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    return folder.plan, plain(altered(json.loads(folder.plan.read_bytes()), by))


Break = Callable[[RunFolder, random.Random], tuple[Path, bytes]]
BROKEN: dict[Break, tuple[tuple[str, ...], ...]] = {
    alter_journal: (
        ("ps", "--all"),
        ("audit",),
        ("receipt", "fox-41"),
        ("report", "fox-41"),
        ("logs", "fox-41"),
        ("resume",),
    ),
    receipt: (("receipt", "fox-41"), ("receipt", "fox-41", "--md"), ("audit",), ("report", "fox-41")),
    events: (("report", "fox-41"), ("ps", "--all"), ("audit",)),
    plan: (("ps", "--all"), ("audit",), ("report", "fox-41")),
}


@pytest.fixture
def home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """Return a home with a finished run and an open one; gpurun starts no supervisor for the open run."""
    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", lambda *_: None)
    home = Home(own_home).prepare()
    finished_run(home, "fox-41")
    opened_run(home, "owl-07")
    return home


@many
@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_no_broken_record_of_a_run_is_a_trace(change: Break, many: int, home: Home) -> None:
    folder = home.run("fox-41")
    for number in range(many):
        by = random.Random(number)
        path, content = change(folder, by)
        whole = path.read_bytes()
        path.write_bytes(content if by.random() < 0.7 else torn(whole, by))
        check(*BROKEN[change][number % len(BROKEN[change])], what=(change.__name__, number))
        path.write_bytes(whole)


@many
def test_no_broken_recipe_is_a_trace(many: int, home: Home, tmp_path: Path) -> None:
    whole = (bundle_root() / "recipes" / "mini-gpt.toml").read_bytes()
    values = list(re.finditer(rb"= *([^#\n]+)", whole))
    nasty = [*b'-1 0 1e999 nan inf 99999999999999999999 "" [] {} true 1.5'.split(), b"[" * 3000]
    for number in range(many):
        by = random.Random(number)
        field = by.choice(values)
        changed = whole[: field.start(1)] + by.choice(nasty) + whole[field.end(1) :]
        (tmp_path / "own.toml").write_bytes(changed if by.random() < 0.7 else torn(whole, by))
        words = ("plan",) if number % 4 == 0 else ("recipes", "show")
        check(*words, str(tmp_path / "own.toml"), what=number)
