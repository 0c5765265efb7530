"""Tests that a machine's words are bounded, harmless data on a receipt, and can never stop a run from ending."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.untrusted import LINE_CHARS, TEXT_CHARS, plain_data, plain_line, plain_text
from gpurun.ledger.audit import audit
from gpurun.ledger.write_receipt import read_receipt, write_receipt
from tests.later import examples
from tests.unit.ledger_samples import CloudRun

ESCAPES = "\x1b]52;c;AAAA\x07 \x9b31m \u202e \u2066 \ufeff \u2028 \x00 \x7f"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


def stated(run: CloudRun) -> dict[str, Any]:
    write_receipt(run.home, run.folder)
    return read_receipt(run.home, run.folder).predicate


@given(text=st.text())
def test_a_line_has_no_control_character_and_bounded_length(text: str) -> None:
    line = plain_line(text)
    assert len(line) <= LINE_CHARS
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E for c in line)
    line.encode()


@given(text=st.text())
def test_a_text_keeps_its_lines_and_nothing_else(text: str) -> None:
    plain = plain_text(text)
    assert len(plain) <= TEXT_CHARS
    assert not any(ord(c) < 32 and c != "\n" for c in plain)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, object(), [[[[[[[[1]]]]]]]]])
def test_what_json_cannot_hold_becomes_null_or_is_cut(value: Any) -> None:
    json.dumps(plain_data(value), allow_nan=False)


def test_escapes_in_log_events_facts_and_names_are_spelled_out(home: Home) -> None:
    run = CloudRun(home)
    run.instance_id = f"pod{ESCAPES}"
    run.folder.log.write_text(f"device: cuda\ncuda_name: H100 {ESCAPES}\nstep 1 | loss {ESCAPES!s} |\n")
    run.folder.events.write_text(json.dumps({"kind": "start", "device": "cuda", "cuda_name": f"H100 {ESCAPES}"}) + "\n")
    with run.folder.events.open("a") as events:
        events.write(json.dumps({"kind": "sample", "step": 1, "prompt": ESCAPES, "text": ESCAPES * 1000}) + "\n")
    text = json.dumps(stated(run.until_gone()), ensure_ascii=False)
    assert not [c for c in text if not c.isprintable()]
    assert "\\\\u{1b}" in text
    run.settle()
    assert audit(home).sound


HOSTILE_LINES = [
    b"[" * 60_000,
    b'{"kind": "step", "loss": 1e999, "step": 99999999999999999999999999}',
    b'{"kind": "step", "loss": NaN, "step": "many"}',
    b'{"kind": ["start"], "device": {"cuda": true}}',
    b'{"kind": "start", "device": ["cuda"]}',
    b'{"kind": "sample", "prompt": {"a": 1}, "text": null}',
    b'{"kind": "eval", "val_loss": true}',
    b'{"kind": "sample", "text": "\\ud800\\udc00 \\ud800", "prompt": 3}',
    b'"just text"',
    b"\xff\xfe\x00",
    b"x" * 300_000,
    b"9" * 5_000,
    b"device: cuda",
    b"step 1 | loss nan |",
]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=st.lists(st.sampled_from(HOSTILE_LINES)),
    events=st.lists(st.sampled_from(HOSTILE_LINES)),
    end=st.sampled_from([b"", b"\n"]),
)
def test_no_log_or_events_stop_the_receipt_or_make_audit_differ(
    tmp_path_factory: pytest.TempPathFactory, log: list[bytes], events: list[bytes], end: bytes
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    run = CloudRun(home)
    run.folder.log.write_bytes(b"\n".join(log) + end)
    run.folder.events.write_bytes(b"\n".join(events) + end)
    run.until_gone().settle()
    report = audit(home)
    assert report.sound, report.rows
    assert len(run.folder.receipt.read_bytes()) < 100_000


def test_a_huge_log_is_read_in_little_memory(home: Home) -> None:
    run = CloudRun(home)
    with run.folder.log.open("ab") as log:
        for _ in range(32):
            log.write(b"z" * (1 << 20))
    run.until_gone()
    tracemalloc.start()
    stated(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log", "events"])
def test_auditing_a_machine_that_never_stops_takes_little_memory(home: Home, name: str) -> None:
    """A machine may send a gigabyte; an audit that kept every line would fail for all other runs, too."""
    run = CloudRun(home)
    words = {"log": "step 0001 | loss 3.9833 | lr 3.00e-04\n", "events": '{"kind": "step", "step": 1, "step_s": 0.1}\n'}
    path = {"log": run.folder.log, "events": run.folder.events}[name]
    path.write_text(path.read_text() + words[name] * 60_000)
    run.until_gone().settle()
    tracemalloc.start()
    sound = audit(home).sound
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (sound, peak < 4 << 20) == (True, True)


def test_hostile_facts_are_cut_to_size(home: Home) -> None:
    run = CloudRun(home)
    run.write(run.opened(), run.intended(), run.created())
    for seconds, (event, data) in run.through_training():
        run.clock.sleep(seconds)
        if event is Event.READY_OBSERVED:
            data["facts"] = {f"key {number}": ["x" * 1_000] * 70 for number in range(70)}
        run.write((event, data))
    predicate = stated(run.play(run.death()))
    assert len(json.dumps(predicate["instance"])) < 20_000
    run.settle()
    assert audit(home).sound


def test_neither_signing_key_nor_environment_reaches_a_receipt(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "canary-4711")
    run = CloudRun(home).until_gone()
    write_receipt(home, run.folder)
    secret = (home.keys / "ed25519.pem").read_bytes().splitlines()[1]
    written = b"".join(path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file())
    assert b"canary-4711" not in written
    assert secret not in written
