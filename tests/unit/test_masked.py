"""Tests that a log masks a secret in each of its known encodings, wherever the output is split into pieces."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from gpurun.core.paths import Home
from gpurun.remote.agent.runner import run_command
from tests.command_line import gpurun
from tests.refusals import lacking
from tests.unit.report_samples import opened_run

LINES = ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", "q83vEjRWeJCrze8SNFZ4kKvN7xI0Vniq", "Qm9iJ3Mga2V5IGlzIG5vdCBoZXJlLg=="]
PEM = "\n".join(["-----BEGIN PRIVATE KEY-----", *LINES, "-----END PRIVATE KEY-----", ""])
TOKEN = 'hf_"quoted"/é+and=more&of it'
ACCOUNT = json.dumps(
    {"type": "service_account", "private_key": PEM, "nested": [{"token": "ya29.c.b0Aaekm1"}]}, indent=2
)


def logged(monkeypatch: pytest.MonkeyPatch, secrets: list[str], pieces: list[bytes]) -> bytes:
    """Return the log of a command that printed its output in these pieces."""
    written = io.BytesIO()
    monkeypatch.setattr(
        "gpurun.remote.agent.runner.run_command.sys", SimpleNamespace(stdout=SimpleNamespace(buffer=written))
    )
    log = run_command.Log(secrets, SimpleNamespace(take=lambda _: None))  # type: ignore[arg-type]
    for piece in pieces:
        log.take(piece)
    log.flush(is_last=True)
    return written.getvalue()


FORMS = {
    "plain": lambda value: value,
    "json": json.dumps,
    "json in json": lambda value: json.dumps({"key": value, "n": 1}),
    "json of letters": lambda value: json.dumps(value, ensure_ascii=False),
    "repr": repr,
    "repr of bytes": lambda value: repr(value.encode()),
    "url": quote,
    "url whole": lambda value: quote(value, safe=""),
    "form": quote_plus,
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "base64 of a login": lambda value: base64.b64encode(b"user:" + value.encode()).decode(),
    "base64 of a url": lambda value: base64.urlsafe_b64encode(b"me:" + value.encode()).decode(),
    "base64 in lines": lambda value: base64.encodebytes(value.encode()).decode(),
    "line by line": lambda value: "\n".join(f"  {number}: {line}" for number, line in enumerate(value.split("\n"))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [PEM, TOKEN], ids=["several lines", "one line"])
def test_no_form_of_a_secret_is_logged_however_it_is_cut(
    form: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = FORMS[form](value).encode()
    printed = b"before " + shown + b" after\n"
    whole = logged(monkeypatch, [value], [printed])
    assert b"[secret]" in whole
    for at in range(0, len(printed), 7):
        said = logged(monkeypatch, [value], [printed[:at], printed[at:]])
        assert said.startswith(b"before ")
        assert said.endswith(b" after\n")
        left = said.replace(b"[secret]", b"")
        # A base64 letter that also encodes text beside the secret is not masked.
        assert len(left) <= len(b"before  after\n") + 40, said
        assert not any(line.encode() in said for line in value.split("\n") if line)
    byte_by_byte = logged(monkeypatch, [value], [printed[at : at + 1] for at in range(len(printed))])
    assert len(byte_by_byte.replace(b"[secret]", b"")) <= len(b"before  after\n") + 40, byte_by_byte


def test_parts_of_a_service_account_are_masked_on_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = f"{PEM}\nya29.c.b0Aaekm1\n{ACCOUNT}\nloss 2.0\n".encode()
    said = logged(monkeypatch, [ACCOUNT], [printed])
    assert not [line for line in [*LINES, "ya29"] if line.encode() in said]
    assert said.endswith(b"loss 2.0\n")


def test_short_lines_and_ordinary_words_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = b"{\n}\nstep 10 | loss 2.0 | abc\n"
    assert logged(monkeypatch, ["{\nabc\nlonger than eight\n}"], [printed]) == printed


@pytest.mark.parametrize("name", ["HF_TOKEN", "RUNPOD_API_KEY"])
def test_no_evidence_is_packed_with_a_value_that_is_at_hand(
    name: str, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(own_home).prepare()
    run: Any = opened_run(home, "fox-41")
    login = base64.b64encode(b"u:" + TOKEN.encode()).decode()
    run.folder.log.write_text(f"{run.folder.log.read_text()}login {login}\n")
    run.until_gone().settle()
    monkeypatch.chdir(tmp_path)
    assert gpurun("evidence", "fox-41", "-o", "before.zip").returncode == 0
    monkeypatch.setenv(name, TOKEN)
    done = gpurun("evidence", "fox-41", "-o", "card.zip")
    assert done.returncode == 2
    assert lacking(done.stderr, "run.log", name) == []
    assert TOKEN not in done.stderr
    assert not (tmp_path / "card.zip").exists()
