"""Tests of notices: each is sent once, only to the user's address and program, and never delays a step of the run."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import MayBeBilling, SetupError, UsageError
from gpurun.core.paths import Home, RunFolder
from gpurun.core.settings import Setting, load_settings
from gpurun.lifecycle.notices import Notices
from tests.refusals import refusal
from tests.unit.ledger_samples import finished_run


class Address(ThreadingHTTPServer):
    """A server that receives notices; with `answer` 302 it redirects them to itself."""

    def __init__(self) -> None:
        self.answer, self.got = 200, list[tuple[str, dict[str, Any]]]()
        super().__init__(("127.0.0.1", 0), Taker)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mine"


class Taker(BaseHTTPRequestHandler):
    server: Address

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, body))
        self.send_response(self.server.answer)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[Address]:
    with Address() as address:
        threading.Thread(target=address.serve_forever, daemon=True).start()
        yield address
        address.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return finished_run(Home(tmp_path).prepare())


def to(url: str = "", program: str = "") -> dict[str, Setting]:
    return {"notify.url": Setting(url, "user"), "notify.exec": Setting(program, "user")}


def begun(folder: RunFolder, settings: dict[str, Setting]) -> Notices:
    """Set up notices while the journal has only its first line, then restore all lines; return the notices."""
    whole = folder.journal.read_bytes()
    folder.journal.write_bytes(whole.split(b"\n")[0] + b"\n")
    notices = Notices(folder, SystemClock(), settings)
    folder.journal.write_bytes(whole)
    return notices


def test_what_comes_on_record_is_sent_once(folder: RunFolder, address: Address) -> None:
    notices = begun(folder, to(address.url))
    for _ in range(2):
        with notices.following():
            notices.may_be_billing(MayBeBilling("destroy.not_gone", "It is there.", hint="End it."))
    assert [body["notice"] for _, body in address.got] == ["may be billing", "started", "trained", "finished"]
    assert {(body["v"], body["run"]) for _, body in address.got} == {(1, folder.name)}
    assert address.got[3][1]["spent_micros"] > 0


def test_a_restarted_supervisor_sends_no_earlier_notices(folder: RunFolder, address: Address) -> None:
    with Notices(folder, SystemClock(), to(address.url)).following():
        pass
    assert [body["notice"] for _, body in address.got] == []


def test_a_slow_notice_program_does_not_delay_gpurun(folder: RunFolder, tmp_path: Path) -> None:
    code = tmp_path / "slow.py"
    code.write_text("import time; time.sleep(60)")
    began = time.monotonic()
    begun(folder, to(program=f"{sys.executable} {code}")).may_be_billing(
        MayBeBilling("x.y", "It is there.", hint="End it.")
    )
    assert time.monotonic() - began < 30


def test_a_redirect_is_not_followed_and_failures_are_logged(
    folder: RunFolder, address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    address.answer = 302
    begun(folder, to(address.url)).look()
    assert {path for path, _ in address.got} == {"/mine"}
    assert "'finished'" in caplog.text
    assert address.url not in caplog.text, "the address of a channel is a secret"


def test_a_program_gets_the_notice_and_none_of_the_keys(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "CANARY")
    out, code = tmp_path / "notices", tmp_path / "take.py"
    code.write_text(f"import os, sys\nopen({str(out)!r}, 'a').write(sys.stdin.read() + repr(dict(os.environ)) + '\\n')")
    begun(folder, to(program=f"{sys.executable} {code}")).look()
    text = out.read_text()
    assert text.count("\n") == 3
    assert str(folder.receipt) in text
    assert "CANARY" not in text


@pytest.mark.parametrize(
    "url", ["http://example.com/x", "http://127.0.0.1:80@example.com/", "https://", "https://[", "ntfy.sh/mine"]
)
def test_an_address_without_https_or_from_a_project_is_refused(tmp_path: Path, url: str) -> None:
    home = Home(tmp_path / "home").prepare()
    home.config.write_text(f'[notify]\nurl = "{url}"\n')
    with refusal(UsageError, "usage.notify", "https://"):
        load_settings(home, project=tmp_path, environment={})
    home.config.unlink()
    (tmp_path / "gpurun.toml").write_text('notify.url = "https://strange.example/x"')
    with refusal(UsageError, "config.not_for_a_project", "notify.url"):
        load_settings(home, project=tmp_path, environment={})


@pytest.mark.parametrize(
    "url",
    [
        "https://169.254.169.254/latest", "https://[fe80::1]/", "https://[fd00:ec2::254]/", "https://100.100.100.200/",
        "https://[::ffff:169.254.169.254]/", "https://me:hunter2hunter2@ntfy.sh/my-runs", "https://hunter2hunter2@ntfy.sh",
    ],
)  # fmt: skip
def test_a_cloud_metadata_or_password_address_is_refused(url: str, tmp_path: Path) -> None:
    home = Home(tmp_path).prepare()
    home.config.write_text(f'[notify]\nurl = "{url}"\n')
    with pytest.raises(UsageError) as refused:
        load_settings(home, project=tmp_path, environment={})
    assert refused.value.code == "usage.notify"
    assert "hunter2" not in refused.value.what + refused.value.hint


def test_nothing_is_said_to_a_name_that_leads_to_a_clouds_keys(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpurun.core.settings._METADATA", {"127.0.0.1"})
    with socket.create_server(("127.0.0.1", 0)) as metadata:
        metadata.settimeout(5)
        with begun(folder, to(f"https://localhost:{metadata.getsockname()[1]}/x")).following():
            pass
        asked, _ = metadata.accept()
        with asked:
            assert asked.recv(1) == b""
    assert "localhost leads to 127.0.0.1" in caplog.text


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_program_others_may_write_is_not_taken_from_its_file(mode: int, tmp_path: Path) -> None:
    home = Home(tmp_path / "home").prepare()
    home.config.write_text('[notify]\nexec = "true"\n')
    assert load_settings(home, project=tmp_path, environment={})["notify.exec"].value == "true"
    for path, usual in ((home.config, 0o600), (home.root, 0o700)):
        path.chmod(mode | usual)
        with pytest.raises(SetupError) as refused:
            load_settings(home, project=tmp_path, environment={})
        assert refused.value.code == "config.open_file"
        assert refused.value.hint.endswith(f"chmod go-w {path}")
        path.chmod(usual)
    home.config.write_text('recipe = "mini-gpt"\n')
    home.config.chmod(0o666)
    assert load_settings(home, project=tmp_path, environment={})["recipe"].value == "mini-gpt"
