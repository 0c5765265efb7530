"""Tests of a push to the Hub: with the user's own login, after the user's yes, and with the Hub's refusals quoted."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.hub_push import push, require_push_setup
from gpurun.cli.session import Session
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import Home
from tests.refusals import refusal

pytest.importorskip("huggingface_hub")


class Hub(ThreadingHTTPServer):
    """A Hub that accepts one repository, with small files inside the commit request."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.refuses = False
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.refuses:
            return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        if self.path == "/api/repos/create":
            self.server.made = json.loads(body)
            return self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/me/tiny"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path == "/api/models/me/tiny/preupload/main":
            files = json.loads(body)["files"]
            return self.answer({"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]})
        if self.path.startswith("/api/models/me/tiny/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"http://127.0.0.1:{self.server.server_port}/me/tiny/commit/abc"
            return self.answer({"success": True, "commitOid": "abc", "commitUrl": url})
        return self.answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        self.answer({"id": "me/tiny", "sha": "abc", "siblings": []})

    def answer(self, reply: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(reply).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
        origin = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", origin)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", origin)  # Another test may already have imported it.
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield hub
        hub.shutdown()


def test_a_model_is_uploaded_whole_to_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "README.md").write_text("# a card")
    url = push(Session(home=Home(tmp_path / "home")), model, "me/tiny", yes=True)
    assert url.endswith("/me/tiny")
    assert hub.files == {"config.json": b"{}", "README.md": b"# a card"}
    assert hub.made["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_mine"}


def test_without_a_yes_nothing_uploads_and_refusals_are_quoted(hub: Hub, tmp_path: Path) -> None:
    session = Session(home=Home(tmp_path / "home"))
    with refusal(UsageError, "input.needed", "me/tiny"):
        push(session, tmp_path, "me/tiny", yes=False)
    assert hub.tokens == set()
    hub.refuses = True
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with refusal(SetupError, "export.not_pushed") as refused:
        push(session, tmp_path / "model", "me/tiny", yes=True)
    assert "hf_mine" not in f"{refused.value.what} {refused.value.hint}"


def test_what_it_needs_is_asked_for_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with refusal(SetupError, "export.no_login"):
        require_push_setup("me/tiny")
    for name in ("tiny", "me/tiny/main", "me/ti ny", "../tiny"):
        with refusal(UsageError, "export.push_name"):
            require_push_setup(name)
