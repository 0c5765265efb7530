"""A box of one's own is asked before its plan is shown: what it would refuse a run, it refuses here, for nothing."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Place
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpurun.core.errors import SetupError
from gpurun.planning import own_box
from gpurun.remote.key_pairs import make_keys
from tests.command_line import gpurun
from tests.emulators import sshd

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


def asked(place: Place, port: int, identity: Path | str, verb: str = "train", *more: str) -> tuple[int, str]:
    """The exit code, and what was said of a run that nobody would have to agree to."""
    host = f"{place.server.user}@127.0.0.1:{port}"
    done = gpurun(
        verb, "mini-gpt", "--provider", "ssh", "--gpu", "cpu", "--host", host, "--identity", str(identity),
        "--set", "data.limit_mb=1", "--no-input", *(["--yes"] if verb == "train" else []), *more,
    )  # fmt: skip
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def inside(folder: Path, before: str = "") -> str:
    """The option of an sshd that runs each command in a folder, as if it were the login's home."""
    folder.mkdir(exist_ok=True)
    return f'ForceCommand {before}cd {folder} && eval "$SSH_ORIGINAL_COMMAND"'


def with_a_file_in_its_way(folder: Path) -> str:
    option = inside(folder)
    (folder / ".gpurun").write_text("notes")
    return option


def without_python(folder: Path) -> str:
    folder.mkdir()
    for name in ("sh", "mkdir", "rmdir"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return inside(folder, f"export PATH={folder}; ")


REFUSALS: dict[str, tuple[Callable[[Path], str], str]] = {
    "nologin": (lambda _: f"ForceCommand {shutil.which('nologin', path='/usr/sbin:/sbin:/usr/bin')}", "not available"),
    "a restricted shell": (lambda _: 'ForceCommand rbash -c "$SSH_ORIGINAL_COMMAND"', "restricted"),
    "no home, and nowhere to write": (
        lambda _: 'ForceCommand echo "Could not chdir to home" >&2; cd /proc/self; eval "$SSH_ORIGINAL_COMMAND"',
        "Could not chdir to home mkdir: cannot create directory",
    ),
    "a file where its folder should be": (with_a_file_in_its_way, "'.gpurun': "),
    "a menu for a terminal": (
        lambda _: "ForceCommand echo Choose 1 or 2; read word; echo A terminal is needed >&2; exit 1",
        "A terminal is needed; on standard output: Choose 1 or 2",
    ),
    "another shell in a start-up file": (lambda _: "ForceCommand exec sh", "it said nothing"),
    "another cipher": (
        lambda _: "Ciphers chacha20-poly1305@openssh.com",
        "it offers chacha20-poly1305@openssh.com; gpurun takes aes128-gcm@openssh.com, ",
    ),
    "no Python": (without_python, "no python3 of 3.8 or newer"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_box_will_never_do_is_told_before_anything_is_opened(place: Place, own_home: Path, name: str) -> None:
    option, words = REFUSALS[name]
    server, began = place.serve(option(place.home / "home")), time.monotonic()
    code, said = asked(place, server.port, place.client)
    assert code == 4, said
    assert words in said
    assert "region" not in said
    assert time.monotonic() - began < 20
    assert list((own_home / "runs").glob("*")) == []


def test_a_key_that_is_not_authorised_is_told_with_the_line_that_is_missing(
    place: Place, own_home: Path, tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other").client_public.rpartition(" ")[0]
    code, said = asked(place, place.server.port, tmp_path / "other" / "client")
    assert code == 4
    assert f"does not let {place.server.user} in" in said
    assert other in said
    assert list((own_home / "runs").glob("*")) == []


def test_a_box_that_begins_nothing_is_waited_for_no_longer_than_its_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_box, "ANSWER_S", 3.0)
    server = place.serve("ForceCommand echo Press a key; sleep 60")
    code, said = asked(place, server.port, place.client)
    assert code == 4
    assert "runs no programs: Press a key in 3 s." in said


def test_a_box_that_answers_is_planned_and_keeps_nothing_of_the_question(place: Place) -> None:
    home = place.home / "home"
    server = place.serve(inside(home, "echo Welcome, it is maintenance on Sunday; "))
    code, said = asked(place, server.port, place.client, "plan")
    assert code == 0, said
    assert list(home.glob(".gpurun/*")) == []


def pem(key: Ed25519PrivateKey, kind: form.PrivateFormat, password: bytes = b"") -> bytes:
    lock = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    return key.private_bytes(form.Encoding.PEM, kind, lock)


def test_a_key_is_taken_in_any_form_that_openssh_writes_and_an_editor_saves(place: Place, tmp_path: Path) -> None:
    own = form.load_ssh_private_key(place.client.read_bytes(), None)
    assert isinstance(own, Ed25519PrivateKey)
    openssh = pem(own, form.PrivateFormat.OpenSSH)
    forms = {
        "PKCS8": pem(own, form.PrivateFormat.PKCS8),
        "BOM": b"\xef\xbb\xbf" + openssh.replace(b"\n", b"\r\n"),
        "UTF-16": openssh.decode().encode("utf-16"),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        machine = place.machine(client_key=tmp_path / name)
        assert machine.call([sys.executable, "-c", ""], timeout_s=20).exit_code == 0, name


def test_a_key_that_cannot_be_used_is_told_before_anything_is_connected(place: Place, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    (tmp_path / "locked").write_bytes(pem(key, form.PrivateFormat.OpenSSH, b"canary"))
    (tmp_path / "locked8").write_bytes(pem(key, form.PrivateFormat.PKCS8, b"canary"))
    (tmp_path / "id.pub").write_text(place.keys.client_public)
    (tmp_path / "id.ppk").write_text("PuTTY-User-Key-File-3: ssh-ed25519\n")
    (tmp_path / "text").write_text("a letter")
    told = {
        "locked": "has a passphrase",
        "locked8": "has a passphrase",
        "id.pub": "holds a public key",
        "id.ppk": "is PuTTY's",
        "text": "not a private key",
        "none": "No such file",
    }
    for name, why in told.items():
        with pytest.raises(SetupError, match=why):
            place.machine(client_key=tmp_path / name).call(["true"], timeout_s=20)
    assert asked(place, place.server.port, tmp_path / "locked")[0] == 4
    assert place.server.connections == 0
