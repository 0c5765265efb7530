"""Tests of keys: read from a prompt or a pipe, stored in one private place, and never shown."""

from __future__ import annotations

import json
import os
import pty
import select
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core import credentials
from gpurun.core.credentials import (
    aws_source,
    clean_key,
    find_credential,
    forget_credential,
    require_credential,
    store_credential,
)
from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import Home
from gpurun.core.secrets import Secret
from tests.command_line import gpurun
from tests.refusals import refusal

KEY = "rpa_CANARY7f3a91"


@pytest.fixture
def home(own_home: Path) -> Home:
    return Home(own_home).prepare()


@pytest.fixture(autouse=True)
def no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the keyring of the user who runs the tests."""
    monkeypatch.setattr(credentials, "keyring", lambda: None)


class Ring(SimpleNamespace):
    """A keyring in memory; with `broken` it raises the error of a locked keyring."""

    broken = False

    def __init__(self) -> None:
        super().__init__(kept={})

    def _open(self) -> dict[tuple[str, str], str]:
        if self.broken:
            from keyring.errors import KeyringLocked

            raise KeyringLocked("locked")
        return self.kept  # type: ignore[no-any-return]

    def get_password(self, service: str, name: str) -> str | None:
        return self._open().get((service, name))

    def set_password(self, service: str, name: str, value: str) -> None:
        self._open()[service, name] = value

    def delete_password(self, service: str, name: str) -> None:
        del self._open()[service, name]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    pytest.importorskip("keyring", reason="the keyring extra is not installed")
    made = Ring()
    monkeypatch.setattr(credentials, "keyring", lambda: made)
    return made


# Valid and invalid keys -----------------------------------------------------------------------------------------------


def test_a_key_is_taken_without_the_blanks_around_it() -> None:
    assert clean_key(f"  {KEY}\r\n").reveal() == KEY
    assert clean_key("secret_name_0a1b.2c3d/4e5f+==").reveal().endswith("==")


@pytest.mark.parametrize(
    "pasted",
    [
        "",
        " \n",
        "two words",
        f"{KEY}\nsecond",
        f'"{KEY}"',
        f"RUNPOD_API_KEY={KEY}",
        f"{KEY}\x1b[A",
        "schlüssel",
        "k" * 2000,
    ],
)
def test_what_is_no_key_is_refused_without_being_repeated(pasted: str) -> None:
    with pytest.raises(UsageError) as refused:
        clean_key(pasted)
    assert "CANARY" not in f"{refused.value.what}{refused.value.hint}"


# Where a key is stored ------------------------------------------------------------------------------------------------


def test_without_a_keyring_a_key_is_in_its_owners_file_alone(home: Home) -> None:
    where = store_credential("runpod", Secret(KEY), home)
    path = home.keys / "runpod.key"
    assert where == f"file {path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.keys.stat().st_mode) == 0o700
    found = require_credential("runpod", home)
    assert (found.secret.reveal(), found.source) == (KEY, where)


def test_the_environment_goes_first_unless_it_is_blank(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    store_credential("runpod", Secret("stored"), home)
    monkeypatch.setenv("RUNPOD_API_KEY", "  ")
    assert require_credential("runpod", home).secret.reveal() == "stored"
    monkeypatch.setenv("RUNPOD_API_KEY", f" {KEY}\n")
    found = require_credential("runpod", home)
    assert (found.secret.reveal(), found.source) == (KEY, "environment RUNPOD_API_KEY")


@pytest.mark.parametrize(("content", "why"), [(None, "Is a directory"), (b"\xff\xfe", "not text")])
def test_a_file_that_cannot_be_read_is_told_in_words(home: Home, content: bytes | None, why: str) -> None:
    """An error of the operating system must reach the user as a sentence, not as a traceback."""
    path = credentials.file_of("runpod", home)
    path.parent.mkdir(exist_ok=True)
    path.mkdir(mode=0o700) if content is None else path.write_bytes(content)
    path.chmod(0o700)
    with pytest.raises(SetupError, match=why):
        find_credential("runpod", home)


def test_a_file_that_others_can_read_is_not_used(home: Home) -> None:
    store_credential("lambda", Secret(KEY), home)
    (home.keys / "lambda.key").chmod(0o644)
    with pytest.raises(SetupError) as refused:
        find_credential("lambda", home)
    assert "chmod 600" in refused.value.hint


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "auth.no_key"), (b" \n", "auth.no_key"), (b"\xff\xfe\x00", "auth.unreadable_file")]
)
def test_an_empty_or_broken_file_is_no_key(home: Home, content: bytes, code: str) -> None:
    home.keys.mkdir()
    path = home.keys / "runpod.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with refusal(SetupError, code):
        require_credential("runpod", home)


def test_the_keyring_holds_the_only_copy(home: Home, ring: Ring) -> None:
    """Storing a key in the keyring must delete an old key file, which would be used if the keyring is locked."""
    home.keys.mkdir()
    (home.keys / "runpod.key").write_text("old")
    assert store_credential("runpod", Secret(KEY), home) == "system keyring"
    assert not (home.keys / "runpod.key").exists()
    assert require_credential("runpod", home).secret.reveal() == KEY
    assert forget_credential("runpod", home) == ["system keyring"]
    assert find_credential("runpod", home) is None


def test_a_keyring_that_does_not_open_leaves_the_file(home: Home, ring: Ring) -> None:
    ring.broken = True
    assert store_credential("runpod", Secret(KEY), home).startswith("file ")
    assert require_credential("runpod", home).secret.reveal() == KEY
    with refusal(SetupError, "auth.keyring"):
        forget_credential("runpod", home)
    assert not (home.keys / "runpod.key").exists()


# The verbs -----------------------------------------------------------------------------------------------------------


def test_a_piped_key_is_kept_used_removed_and_never_shown(home: Home) -> None:
    spoken = ""
    for arguments in (
        ["auth", "set", "runpod"], ["auth", "set", "lambda-guard", "--json"], ["auth", "status"],
        ["auth", "status", "--json", "-v"], ["auth", "rm", "runpod"], ["auth", "rm", "runpod"],
        ["auth", "rm", "lambda-guard"],
    ):  # fmt: skip
        done = gpurun(*arguments, given=f"{KEY}\n")
        spoken += done.stdout + done.stderr
        assert done.returncode == 0, done
    assert "CANARY" not in spoken
    assert "7f3a91" not in spoken
    assert find_credential("runpod", home) is None


def test_status_says_where_from_in_json(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    store_credential("lambda", Secret(KEY), home)
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    done = gpurun("auth", "status", "--json")
    rows = {row["provider"]: row for row in json.loads(done.stdout)["data"]["providers"]}
    assert rows["runpod"]["source"] == "environment RUNPOD_API_KEY"
    assert rows["lambda"]["source"] == f"file {home.keys / 'lambda.key'}"
    assert (rows["lambda-guard"]["key"], rows["lambda-guard"]["source"]) == (False, None)
    assert rows["aws"]["source"] == "environment AWS_PROFILE"


def test_a_key_that_cannot_be_used_hides_no_other(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    store_credential("lambda", Secret(KEY), home)
    (home.keys / "lambda.key").chmod(0o644)
    done = gpurun("auth", "status", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["errors"][0]["code"]) == (4, "auth.broken_key")
    assert answer["data"]["providers"][0]["key"]


WRONG = [
    (["auth", "set", "runpod", KEY], "auth.key_as_argument"),
    (["auth", "set", "runpod", "--key", KEY], "usage"),
    (["auth", "set", "aws"], "auth.aws"),
    (["auth", "rm", "aws"], "auth.aws"),
    (["auth", "set", "ssh"], "auth.no_key_needed"),
    (["auth", "set", "runpad"], "provider.unknown"),
    (["auth", "set", "runpod"], "auth.empty_key"),
]


@pytest.mark.parametrize(("arguments", "code"), WRONG)
def test_wrong_input_changes_nothing_and_repeats_no_key(home: Home, arguments: list[str], code: str) -> None:
    done = gpurun(*arguments, "--json")
    assert (done.returncode, json.loads(done.stdout)["errors"][0]["code"]) == (2, code)
    assert "CANARY" not in done.stdout + done.stderr
    assert not home.keys.exists()


@pytest.mark.usefixtures("home")
def test_a_key_in_the_environment_is_said_to_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    kept = gpurun("auth", "set", "runpod", given="other")
    assert "takes precedence" in kept.stdout
    removed = gpurun("auth", "rm", "runpod")
    assert "unset RUNPOD_API_KEY" in removed.stdout


def test_the_prompt_shows_nothing_of_what_is_typed(home: Home) -> None:
    """The prompt runs at a real terminal, because only a terminal would show the typed key."""
    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "gpurun.cli.app", "auth", "set", "lambda-guard"],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, close_fds=True,
        env={**os.environ, "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"},
    )  # fmt: skip
    os.close(terminal)
    screen = _read_until(controller, b"not shown")
    os.write(controller, f"{KEY}\n".encode())
    screen += _read_until(controller, b"lambda-guard.key")
    assert child.wait(30) == 0
    os.close(controller)
    assert b"CANARY" not in screen
    assert require_credential("lambda-guard", home).secret.reveal() == KEY


def _read_until(controller: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([controller], [], [], 30)
        assert ready, f"the terminal shows only {seen!r}"
        seen += os.read(controller, 4096)
    return seen


# AWS credentials ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "is_there"),
    [
        ("[default]\naws_access_key_id = AKIA\naws_secret_access_key = x\n", True),
        ("[profile lab]\nsso_session = lab\nregion = us-east-1\n", True),
        ("[default]\ncredential_process = /usr/bin/vault\n", True),
        ("[default]\nregion = us-east-1\noutput = json\n", False),
        ("", False),
    ],
)
def test_aws_credentials_are_seen_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, is_there: bool
) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
    assert aws_source() == (f"file {path}" if is_there else None)


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI"])
def test_aws_credentials_are_seen_in_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    assert aws_source() is None
    monkeypatch.setenv(variable, "x")
    assert aws_source() == f"environment {variable}"


def test_looking_for_keys_asks_no_cloud_and_loads_no_sdk() -> None:
    code = "import sys; from gpurun.core.credentials import aws_source; aws_source(); print('boto3' in sys.modules)"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
