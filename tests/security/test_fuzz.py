"""Fifteen thousand records that somebody has broken: a verb has a sentence for each, never a trace, within its bounds.

A change within a record keeps what vouches for it right, the chain or the envelope: then it is read to its depth.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import canonical
from tests.command_line import gpurun
from tests.memory import forget_own_peak, own_growth_bytes
from tests.unit.report_samples import finished_run, opened_run

FEW, MANY = 80, 3_000
MOST_S, MOST_BYTES = 10.0, 1 << 30
many = pytest.mark.parametrize("many", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, 1 << 64, 10**400, "", "x" * 5000, "\ud800", "\x1b[2J\x07\u202e", "../../etc", [], {},
    [[[]]], {"a": {"b": {}}}, [None], ["x"] * 100, "NaN", "1970-01-01T00:00:00Z",
    json.loads("[" * 90 + "]" * 90),
)  # fmt: skip
WORDS = (
    b"NaN", b"-Infinity", b"1e999", b"[" * 5000, b'{"a":' * 5000, b"\0", b"\xff\xfe", b"\n", b'"', b"9" * 5000,
    b"[0," * 100_000, b" " * (1 << 20),
)  # fmt: skip


def torn(content: bytes, by: random.Random) -> bytes:
    """The bytes with a flip, a gap, a repeat, an end or a strange word somewhere."""
    at, length = by.randrange(len(content) + 1), by.choice([1, 2, 7, 60])
    return by.choice(
        [
            content[:at] + bytes([by.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at + length :],
            content[: at + length] + content[at:],
            content[:at],
            content[:at] + by.choice(WORDS) + content[at:],
        ]
    )


def altered(value: Any, by: random.Random) -> Any:
    """The same JSON with one of its values, at any depth, gone or another one."""
    if isinstance(value, dict | list) and value and by.random() < 0.9:
        key = by.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed: Any = value.copy()
        if by.random() < 0.15:
            del changed[key]
        else:
            changed[key] = altered(value[key], by)
        return changed
    return by.choice(NASTY)


def plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def journal(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    """The journal with one record altered and all lines after it chained again."""
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
    """The receipt with its statement altered, as somebody without the key can make it."""
    envelope = json.loads(folder.receipt.read_bytes())
    if by.random() < 0.3:
        return folder.receipt, plain(altered(envelope, by))
    statement = altered(json.loads(base64.b64decode(envelope["payload"])), by)
    return folder.receipt, plain(envelope | {"payload": base64.b64encode(plain(statement)).decode()})


def events(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    """The trainer's events with one of them altered."""
    lines = folder.events.read_bytes().splitlines()
    place = by.randrange(len(lines))
    lines[place] = plain(altered(json.loads(lines[place]), by))
    return folder.events, b"\n".join([*lines, b""])


def plan(folder: RunFolder, by: random.Random) -> tuple[Path, bytes]:
    return folder.plan, plain(altered(json.loads(folder.plan.read_bytes()), by))


Break = Callable[[RunFolder, random.Random], tuple[Path, bytes]]
BROKEN: dict[Break, tuple[tuple[str, ...], ...]] = {
    journal: (
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
    """A home with a finished run and an open one; nobody is started for what looks unfinished."""
    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", lambda *_: None)
    home = Home(own_home).prepare()
    finished_run(home, "fox-41")
    opened_run(home, "owl-07")
    return home


def check(*words: str, what: object = "") -> str:
    """Run a verb as a user does: a documented exit code that is not a bug's, within its time and memory."""
    began = time.process_time()
    forget_own_peak()
    done = gpurun(*words)
    said = done.stdout + done.stderr
    assert "gpurun itself failed" not in said, (words, what, said)
    assert "Traceback" not in said, (words, what, said)
    assert done.returncode in {*map(int, ExitCode)} - {int(ExitCode.BUG)}, (words, what, done.returncode, said)
    assert time.process_time() - began < MOST_S, (words, what)
    assert own_growth_bytes() < MOST_BYTES, (words, what)
    return said


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
        one = by.choice(values)
        changed = whole[: one.start(1)] + by.choice(nasty) + whole[one.end(1) :]
        (tmp_path / "own.toml").write_bytes(changed if by.random() < 0.7 else torn(whole, by))
        words = ("plan",) if number % 4 == 0 else ("recipes", "show")
        check(*words, str(tmp_path / "own.toml"), what=number)
