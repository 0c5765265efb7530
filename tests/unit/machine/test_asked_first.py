"""Tests that the user's own box is checked before its plan is shown, so that an unsuitable box costs nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Place
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gpurun.core.errors import SetupError
from gpurun.core.known_hosts import remember_host
from gpurun.core.paths import Home
from gpurun.core.records import Address
from gpurun.planning import own_box
from gpurun.remote.key_pairs import make_keys
from gpurun.remote.ssh import ExpectedKey, Jump
from tests.command_line import gpurun
from tests.emulators import sshd
from tests.emulators.proxy import Proxy
from tests.refusals import lacking, refusal

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


def asked(
    place: Place, port: int, identity: Path | str, verb: str = "train", *more: str, python: str = sys.executable
) -> tuple[int, str]:
    """Plan or start a run on the box without approval; return the exit code and all output."""
    host = f"{place.server.user}@127.0.0.1:{port}"
    done = gpurun(
        verb, "mini-gpt", "--provider", "ssh", "--gpu", "cpu", "--host", host, "--identity", str(identity),
        "--set", "data.limit_mb=1", "--no-input", *(["--python", python] if python else []),
        *(["--yes"] if verb == "train" else []), *more,
    )  # fmt: skip
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def inside(folder: Path, before: str = "") -> str:
    """Return the sshd option that runs each command in this folder, as if it were the user's home."""
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
        "A terminal is needed",
    ),
    "another shell in a start-up file": (lambda _: "ForceCommand exec sh", "[ssh.no_programs]"),
    "another cipher": (lambda _: "Ciphers chacha20-poly1305@openssh.com", "aes128-gcm@openssh.com"),
    "no Python": (without_python, "python3"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_box_can_never_do_is_reported_before_connecting(place: Place, own_home: Path, name: str) -> None:
    option, words = REFUSALS[name]
    server, began = place.serve(option(place.home / "home")), time.monotonic()
    code, said = asked(place, server.port, place.client, python="" if name == "no Python" else sys.executable)
    assert code == 4, said
    assert words in said
    assert "region" not in said
    assert time.monotonic() - began < 20
    assert list((own_home / "runs").glob("*")) == []


def test_an_unauthorised_key_gets_the_missing_line_to_add(place: Place, own_home: Path, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other").client_public.rpartition(" ")[0]
    code, said = asked(place, place.server.port, tmp_path / "other" / "client")
    assert code == 4
    assert "ssh.not_let_in" in said
    assert other in said
    assert list((own_home / "runs").glob("*")) == []


def test_a_box_that_starts_nothing_is_waited_for_to_its_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_box, "ANSWER_S", 3.0)
    server = place.serve("ForceCommand echo Press a key; sleep 60")
    code, said = asked(place, server.port, place.client)
    assert code == 4
    assert lacking(said, "ssh.no_programs", "Press a key", "3 s") == []


def test_a_box_that_answers_is_planned_and_keeps_no_trace(place: Place) -> None:
    home = place.home / "home"
    server = place.serve(inside(home, "echo Welcome, it is maintenance on Sunday; "))
    code, said = asked(place, server.port, place.client, "plan")
    assert code == 0, said
    assert list(home.glob(".gpurun/*")) == []


def pem(key: Ed25519PrivateKey, kind: form.PrivateFormat, password: bytes = b"") -> bytes:
    lock = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    return key.private_bytes(form.Encoding.PEM, kind, lock)


def test_a_key_is_taken_in_any_form_openssh_or_an_editor_saves(place: Place, tmp_path: Path) -> None:
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


def test_an_unusable_key_is_reported_before_connecting(place: Place, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    (tmp_path / "locked").write_bytes(pem(key, form.PrivateFormat.OpenSSH, b"canary"))
    (tmp_path / "locked8").write_bytes(pem(key, form.PrivateFormat.PKCS8, b"canary"))
    (tmp_path / "id.ppk").write_text("PuTTY-User-Key-File-3: ssh-ed25519\n")
    (tmp_path / "text").write_text("a letter")
    causes = {
        "locked": "passphrase",
        "locked8": "passphrase",
        "id.ppk": "PuTTY",
        "text": "private key",
        "none": "No such file",
    }
    for name, why in causes.items():
        with refusal(SetupError, "ssh.identity", name, why):
            place.machine(client_key=tmp_path / name).call(["true"], timeout_s=20)
    assert asked(place, place.server.port, tmp_path / "locked")[0] == 4
    assert place.server.connections == 0


# What a box has


def test_the_plan_says_what_a_box_has_and_a_lack_opens_no_run(place: Place, own_home: Path) -> None:
    server = place.serve(inside(place.home / "home"))
    code, said = asked(place, server.port, place.client, "plan")
    assert code == 0, said
    assert re.search(r"no GPU, torch \d+\.\d+\.\S+, Python 3\.\d+\.\d+", said), said
    bare = place.home / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    code, said = asked(place, server.port, place.client, python=f"{bare}/bin/python")
    assert (code, lacking(said, "imports torch", "--python PATH")) == (4, []), said
    code, said = asked(place, server.port, place.client, "train", "--gpu", "1xA100")
    assert (code, lacking(said, "box.no_gpu", "--gpu")) == (5, []), said
    assert list((own_home / "runs").glob("*")) == []
    assert list((place.home / "home" / ".gpurun").iterdir()) == []


# The way to a box


def test_a_jump_host_is_asked_too_and_both_host_keys_are_kept(place: Place, own_home: Path) -> None:
    """The box is behind a jump host: gpurun must check and store the host keys of both."""
    box, bastion = place.serve(inside(place.home / "home")), place.serve("AllowTcpForwarding yes")
    jump = ("--jump", f"{bastion.user}@127.0.0.1:{bastion.port}")
    code, said = asked(place, box.port, place.client, "plan", *jump)
    assert code == 0, said
    assert "host key" in said
    assert "direct-tcpip" in bastion.log
    assert (box.connections, bastion.connections) == (2, 3), "for each host key, and for the question"
    known = json.loads((own_home / "known_hosts.json").read_text())
    assert set(known) == {
        f"[127.0.0.1]:{bastion.port}", f"[127.0.0.1 by {bastion.user}@127.0.0.1:{bastion.port}]:{box.port}"
    }  # fmt: skip


def test_a_dead_end_or_strange_jump_host_is_named_as_that(place: Place, own_home: Path) -> None:
    shut = place.serve("AllowTcpForwarding no")
    code, said = asked(place, place.server.port, place.client, "plan", "--jump", f"root@127.0.0.1:{shut.port}")
    assert code == 4
    assert lacking(said, f"127.0.0.1:{shut.port} ", f"127.0.0.1:{place.server.port}") == []
    assert place.server.connections == 0
    remember_host(Home(own_home), "127.0.0.1", shut.port, make_keys(place.home / "other").host_public)
    code, said = asked(place, place.server.port, place.client, "plan", "--jump", f"root@127.0.0.1:{shut.port}")
    assert (code, "ssh.host_key_changed" in said) == (4, True)


def test_a_large_file_passes_a_jump_host_and_nothing_stays_open(place: Place, tmp_path: Path) -> None:
    jump = Jump(Address(kind="ssh", host="127.0.0.1", port=place.serve().port, user=place.server.user),
                ExpectedKey.parse(place.keys.host_public))  # fmt: skip
    threads, content = threading.active_count(), os.urandom(24 << 20)
    machine = place.machine(jump=jump)
    machine.put("large", content)
    assert machine.call(["cat", "large"], timeout_s=60).stdout == content
    machine.close()
    end = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.02)
    assert threading.active_count() <= threads


def test_a_box_at_an_ipv6_address_is_named_in_brackets(place: Place) -> None:
    proxy = Proxy(place.serve(inside(place.home / "home")).port, at=("::1", 0))
    host = f"{place.server.user}@[::1]:{proxy.port}"
    try:
        code, said = asked(place, proxy.port, place.client, "plan", "--host", host)
    finally:
        proxy.close()
    assert code == 0, said
    code, said = asked(place, proxy.port, place.client, "plan", "--host", host)
    assert (code, f"[::1]:{proxy.port} " in said) == (4, True)


def test_the_python_that_was_named_is_the_one_that_is_asked(place: Place) -> None:
    server = place.serve(inside(place.home / "home"))
    code, said = asked(place, server.port, place.client, "plan", "--python", "~/x/bin/python")
    assert (code, "~/x/bin/python" in said) == (2, True)
    code, said = asked(place, server.port, place.client, "plan", "--python", "/opt/x/bin/python")
    assert (code, lacking(said, "/opt/x/bin/python", "3.8")) == (4, [])
    assert asked(place, server.port, place.client, "plan", "--python", sys.executable)[0] == 0


def test_an_agent_shows_its_keys_in_turn(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path / "other")
    with sshd.key_agent(tmp_path, tmp_path / "other" / "client") as socket_path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        code, said = asked(place, place.server.port, "agent", "plan")
        assert (code, "ssh.not_let_in" in said) == (4, True)
        subprocess.run(["ssh-add", "-q", place.client], check=True)
        assert place.machine(client_key="agent").call(["true"], timeout_s=20).exit_code == 0
    code, said = asked(place, place.server.port, "agent", "plan")
    assert (code, "ssh.agent" in said) == (4, True)


def test_a_password_only_box_is_not_told_to_add_a_key(place: Place) -> None:
    server = place.serve("PubkeyAuthentication no", "PasswordAuthentication yes", "PermitRootLogin yes")
    code, said = asked(place, server.port, place.client, "plan")
    assert code == 4
    assert "keyboard-interactive" in said
    assert "PubkeyAuthentication yes" in said
    assert "authorized_keys" not in said


def test_too_many_agent_keys_lead_to_advice_to_name_one(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.serve("MaxAuthTries 3")
    strangers = [tmp_path / f"other-{number}" / "client" for number in range(7)]
    for stranger in strangers:
        make_keys(stranger.parent)
    with sshd.key_agent(tmp_path, *strangers, place.client) as socket_path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        code, said = asked(place, server.port, "agent", "plan")
    assert code == 4
    assert "3 of 8" in said
    assert "--identity FILE" in said
    assert "authorized_keys" not in said, "the line is there: its key was not shown"
    (tmp_path / "mine.pub").write_text(place.keys.client_public)
    code, said = asked(place, server.port, tmp_path / "mine.pub", "plan")
    assert (code, f"{tmp_path}/mine.pub" in said) == (4, True)
    with sshd.key_agent(tmp_path / "keys", *strangers, place.client) as socket_path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        code, said = asked(place, server.port, tmp_path / "mine.pub", "plan")
    assert code == 0, said
    assert "SSH agent" in said
