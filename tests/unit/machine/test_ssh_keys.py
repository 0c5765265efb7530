"""Tests of a run's keys: made once, kept through every crash, and readable only by their owner."""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from gpurun.core.errors import SetupError, UsageError
from gpurun.remote import key_pairs
from gpurun.remote.key_pairs import fingerprint, forget_client_key, make_keys
from tests.refusals import refusal

PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIK4PdOOnLJ7SHfAOAo6EfBUcgOZf2I0LXv42oYhcOhoh gpurun"
DIGEST = "SHA256:ivA5hiCi7nZEvjaiK/1/JCSNy960yGE3i0tyG0LMbIQ"


def test_two_pairs_are_made_that_only_their_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "ssh"
    keys = make_keys(folder)
    assert {path.name for path in folder.iterdir()} == {"client", "client.pub", "host", "host.pub", ".lock"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("client", "host"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert (folder / "client.pub").read_text() == f"{keys.client_public}\n"
    assert (folder / "host.pub").read_text() == f"{keys.host_public}\n"
    assert (folder / "host").read_text() == keys.host_private.get_secret_value()
    assert keys.client_public.split()[::2] == keys.host_public.split()[::2] == ["ssh-ed25519", "gpurun"]
    assert keys.client_public != keys.host_public
    assert "OPENSSH" not in repr(keys)


def test_the_same_keys_are_told_again(tmp_path: Path) -> None:
    assert make_keys(tmp_path) == make_keys(tmp_path)


@pytest.mark.parametrize("lost", ["client.pub", "host", "host.pub", "client", ""])
def test_after_a_crash_what_was_made_stays_and_the_rest_is_made(tmp_path: Path, lost: str) -> None:
    before = make_keys(tmp_path)
    for name in ("client.pub", "host", "host.pub") if not lost else (lost,):
        (tmp_path / name).unlink()
    (tmp_path / f".{lost}.1.2.tmp").write_text("a torn write")
    after = make_keys(tmp_path)
    assert (after.client_public == before.client_public) == (lost != "client")
    assert (after.host_public == before.host_public) == (lost not in ("host", ""))
    assert make_keys(tmp_path) == after


def test_keys_cut_by_a_crash_at_any_write_are_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = key_pairs.write_atomic

    class Died(BaseException):
        pass

    for survived in range(4):
        folder, left = tmp_path / str(survived), [survived]

        def dies(path: Path, content: bytes, left: list[int] = left) -> None:
            if not left[0]:
                raise Died
            left[0] -= 1
            write(path, content)

        monkeypatch.setattr(key_pairs, "write_atomic", dies)
        with pytest.raises(Died):
            make_keys(folder)
        kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
        monkeypatch.setattr(key_pairs, "write_atomic", write)
        make_keys(folder)
        assert {name: (folder / name).read_bytes() for name in kept} == kept
        assert (folder / "host").exists()


@pytest.mark.parametrize("content", [b"", b"not a key", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_a_damaged_key_is_told_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    make_keys(tmp_path)
    (tmp_path / "host").write_bytes(content)
    with refusal(SetupError, "ssh.key_damaged"):
        make_keys(tmp_path)
    assert (tmp_path / "host").read_bytes() == content


def test_two_at_once_are_told_the_same_keys(tmp_path: Path) -> None:
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.append(make_keys(tmp_path).client_public)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


def test_the_client_key_can_be_forgotten_and_the_host_key_stays(tmp_path: Path) -> None:
    make_keys(tmp_path)
    for _ in range(2):
        forget_client_key(tmp_path)
        assert not (tmp_path / "client").exists()
    assert (tmp_path / "host.pub").exists()
    forget_client_key(tmp_path / "never made")
    assert not (tmp_path / "never made").exists()


def test_a_fingerprint_is_what_ssh_keygen_prints(tmp_path: Path) -> None:
    assert fingerprint(PUBLIC) == fingerprint(PUBLIC.rpartition(" ")[0]) == DIGEST
    assert fingerprint(DIGEST) == fingerprint(f"  {DIGEST}=\n") == DIGEST
    if shutil.which("ssh-keygen"):
        keys = make_keys(tmp_path)
        argv = ["ssh-keygen", "-l", "-f", str(tmp_path / "host")]
        assert fingerprint(keys.host_public) in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


BAD = ["", "SHA256:", "SHA256:short", f"SHA256:{'A' * 42}*", "MD5:00:11", hashlib.sha256(b"x").hexdigest()]
BAD += ["ssh-ed25519", "ssh-ed25519 !!!!", f"ssh-rsa {PUBLIC.split()[1]}", "/etc/passwd", "x" * 9999]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20])
def test_what_is_no_host_key_is_a_usage_error(text: str) -> None:
    with refusal(UsageError, "host_key.malformed"):
        fingerprint(text)
