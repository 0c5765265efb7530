"""Tests of packs: equal files make equal packs, no pack holds a secret, and unfit files are refused by name."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.core.errors import UsageError
from gpurun.remote import secret_forms
from gpurun.remote.archive import Pack, content_at, survey
from tests.later import examples
from tests.refusals import refusal

ROOT = Path(__file__).parents[3]


def content_of(pack: Pack) -> dict[str, bytes]:
    """Return the files of a pack by name, read without gpurun's own reader."""
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(b"".join(pack.stream()))).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        members = tar.getmembers()
        assert all((m.isreg(), m.mtime, m.uid, m.gid, m.mode) == (True, 0, 0, 0, 0o644) for m in members)
        return {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


PART = st.text("abcAB12_-é", min_size=1, max_size=6)
TREES = st.dictionaries(
    st.lists(PART, min_size=1, max_size=3).map("/".join), st.binary(max_size=2000), min_size=1, max_size=8
).filter(lambda tree: not any(b.startswith(a + "/") for a in tree for b in tree))


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=TREES, shuffle=st.randoms(use_true_random=False))
def test_equal_files_make_equal_bytes_in_any_order_time_and_mode(
    tmp_path: Path, files: dict[str, bytes], shuffle: object
) -> None:
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    shutil.rmtree(tmp_path / "b", ignore_errors=True)
    first = write(tmp_path / "a", files)
    names = sorted(files)
    shuffle.shuffle(names)  # type: ignore[attr-defined]
    second = write(tmp_path / "b", {name: files[name] for name in names})
    for number, name in enumerate(names):
        os.utime(second / name, (number, number))
        os.chmod(second / name, 0o700)
    packs = [Pack(survey({"data": folder})) for folder in (first, second)]
    for codec in ("zstd", "gzip"):
        assert b"".join(packs[0].stream(codec)) == b"".join(packs[1].stream(codec))
    assert packs[0].manifest_sha256 == packs[1].manifest_sha256 == packs[0].name()


def test_a_pack_has_its_files_in_order_and_the_manifest_last(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "trainer", {"b.py": b"b" * 700, "a/c.py": b"", "__pycache__/b.pyc": b"", ".git/HEAD": b""}
    )
    pack = Pack(
        survey({"data": write(tmp_path / "d", {"x.bin": b"x"}), "bundle/trainer": folder, "bundle/r.json": b"{}"})
    )
    found = content_of(pack)
    names = ["bundle/r.json", "bundle/trainer/a/c.py", "bundle/trainer/b.py", "data/x.bin"]
    assert list(found) == [*names, ".manifest.json"]
    listed = json.loads(found[".manifest.json"])
    assert [file["name"] for file in listed["files"]] == names
    assert all(file["sha256"] == hashlib.sha256(found[file["name"]]).hexdigest() for file in listed["files"])
    assert pack.manifest_sha256 == hashlib.sha256(found[".manifest.json"]).hexdigest()
    assert (pack.content_bytes, pack.survey.total_bytes) == (703, 703)


def test_gzip_is_plain_gzip() -> None:
    plain = zlib.decompress(b"".join(Pack(survey({"data/x": b"hello"})).stream("gzip")), wbits=31)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        assert tar.getnames() == ["data/x", ".manifest.json"]


SECRETS = [
    *(".env", ".env.local", "prod.env", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".aws/config"),
    *(".ssh/config", "id_rsa", "id_ed25519.pub", "server.pem", "tls.key", "store.p12", "credentials"),
    *("credentials.json", "aws_credentials", "kaggle.json", "token", "hf_token", "token.txt"),
    *("client_secret_1.json", "service-account.json", "my_api_key", "runpod-api-key.txt", "secrets.toml"),
    *("secret", "ID_RSA", ".Env", ".kube/config", ".docker/config.json", "passwords.kdbx", ".token"),
    *("terraform.tfstate", ".bash_history", ".python_history", "fish_history", "prod.tfvars", "x.tfvars.json"),
    *("rclone.conf", "AuthKey_1.p8"),
]
HEX = "0a1b2c3d4e" * 4
TEXTS = {
    "a private key": ["-----BEGIN OPENSSH PRIVATE KEY-----"],
    "a key of AWS": ["AKIA" + "Z" * 16],
    "a secret key of AWS": ["aws_secret_access_key = " + "aB3/" * 10, '"SecretAccessKey": "' + "aB3+" * 10],
    "a token of Hugging Face": ["hf_" + "a" * 34],
    "a key of RunPod": ["rpa_" + "A" * 30],
    "an API key (sk-)": ["sk-proj-" + "a" * 20],
    "a token of GitHub": [*(f"{kind}_" + "a1B" * 12 for kind in ("ghp", "gho", "ghs")), "github_pat_" + "a1" * 30],
    "a token of Slack": [f"xox{kind}-1234567890-abcdef" for kind in "abp"],
    "a key of Google": ["AIza" + "a1-B_" * 7],
    "a key of W&B": [f"wandb.login(key='{HEX}')", f"WANDB_API_KEY={HEX}", f'"api_key": "{HEX}"', "wandb_v1_" + HEX],
    "a line of .netrc": [
        "\nmachine api.wandb.ai login user password p4ssw0rd",
        "\nmachine a\n  login b\n  password cdefg",
    ],
}
KEYS = [(what, key) for what, keys in TEXTS.items() for key in keys]
WHOLE_KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEowIBAAKCAQEA" * 4 + "\n-----END RSA PRIVATE KEY-----\n"

ORDINARY = {
    "requirements.txt": f"wandb @ git+https://github.com/wandb/wandb@{HEX}\nwandb==0.16 --hash=sha256:{HEX}{HEX[:24]}",
    "page.html": ".sk-toggleable__label-arrow:before sk-toggleable__content-fitted task-specific-pretraining-objective",
    "README.md": f"aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\nAKIAIOSFODNN7EXAMPLE\ngit {HEX}",
    "netrc.md": "machine api.wandb.ai login user password <your key>\nmachine learning login password",
    "login.py": "token = 'hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'; api_key = os.environ['WANDB_API_KEY']",
    "ssl.so": "\0-----BEGIN RSA PRIVATE KEY-----\0-----END RSA PRIVATE KEY-----\0",
    "test_git_credentials.py": "import subprocess",
}

HARMLESS = [
    *("tokenizer.json", "tokens.bin", "token_ids.npy", "train_000001.bin", "environment.txt", "keys.py"),
    *("keyboard.md", "env.py", "secrets.py", "README.md", "vocab.json", "monkey.txt", ".gitignore"),
    *("data.json", "credentialing.txt", "loss_history", "history.txt"),
]


@pytest.mark.parametrize("name", SECRETS)
def test_what_looks_like_a_secret_is_refused_by_name(tmp_path: Path, name: str) -> None:
    seen = survey({"data": write(tmp_path, {name: b"canary", "good.bin": b"1"})})
    assert [(refusal.code, refusal.path) for refusal in seen.refusals] == [
        ("pack.secret", str(tmp_path / Path(name).parts[0]))
    ]
    assert [file.name for file in seen.files] == ["data/good.bin"]
    with refusal(UsageError, "pack.secret", seen.refusals[0].path):
        next(Pack(seen).stream())


@pytest.mark.parametrize(("what", "key"), KEYS)
def test_a_text_that_holds_a_key_is_refused_without_showing_it(tmp_path: Path, what: str, key: str) -> None:
    """A key may also be in a notebook, a script or settings whose name does not show it."""
    text = f"first = 1\nkey = '{key}'\n".encode()
    folder = write(tmp_path, {"notes.py": text, "shard.bin": b"\0" + text, "near.py": b"mask-" + text[:9]})
    (refusal,) = survey({"data": folder}).refusals
    assert (refusal.code, refusal.path) == ("pack.secret", str(tmp_path / "notes.py"))
    assert what in refusal.reason
    assert not survey({"data": folder}, [refusal.path]).refusals


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"x " * 1_500_000 + TEXTS["a token of GitHub"][0].encode(), id="at the end of a large text"),
        pytest.param(b" " * ((1 << 20) - 20) + TEXTS["a token of GitHub"][0].encode(), id="where two reads meet"),
        pytest.param(bytes(3 << 20) + WHOLE_KEY.encode(), id="at the end of a large binary"),
        pytest.param(WHOLE_KEY.encode("utf-16"), id="UTF-16"),
        pytest.param(b"\1" + WHOLE_KEY.encode("utf-16-be"), id="UTF-16 without a mark"),
        pytest.param(TEXTS["a key of Google"][0].encode("utf-16"), id="another key in UTF-16"),
        pytest.param(gzip.compress(b"x" * 3_000_000) + gzip.compress(WHOLE_KEY.encode()), id="gzip, two members"),
        pytest.param(bz2.compress(TEXTS["a token of Slack"][0].encode()), id="bzip2"),
        pytest.param(lzma.compress(WHOLE_KEY.encode()), id="xz"),
    ],
)
def test_a_key_is_found_anywhere_in_a_file_in_any_encoding(tmp_path: Path, content: bytes) -> None:
    (refusal,) = survey({"data": write(tmp_path, {"dump": content})}).refusals
    assert refusal.code == "pack.secret"


def test_a_damaged_or_endless_compressed_file_is_read_in_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_forms, "MOST_UNPACKED_BYTES", 2 << 20)
    bomb = gzip.compress(b"x" * (8 << 20) + WHOLE_KEY.encode())
    folder = write(tmp_path, {"bomb.gz": bomb, "cut.gz": bomb[:50], "no.gz": b"\x1f\x8b not gzip", "empty": b""})
    assert not survey({"data": folder}).refusals


def test_what_ordinary_projects_hold_is_no_key(tmp_path: Path) -> None:
    folder = write(tmp_path, {name: text.encode() for name, text in ORDINARY.items()})
    assert not survey({"data": folder}).refusals


def test_data_and_code_are_not_taken_for_secrets(tmp_path: Path) -> None:
    assert not survey({"data": write(tmp_path, dict.fromkeys(HARMLESS, b"x"))}).refusals


def test_a_source_may_itself_be_a_link(tmp_path: Path) -> None:
    write(tmp_path, {"real/x.bin": b"1", "y.py": b"2"})
    (tmp_path / "data").symlink_to("real")
    (tmp_path / "z.py").symlink_to("y.py")
    found = content_of(Pack(survey({"data": tmp_path / "data", "bundle/z.py": tmp_path / "z.py"})))
    assert (found["data/x.bin"], found["bundle/z.py"]) == (b"1", b"2")


def test_links_pipes_and_names_that_do_not_travel_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"in/real.bin": b"1", "in/a\nb": b"1", "outside.bin": b"canary"})
    os.symlink(tmp_path / "outside.bin", tmp_path / "in" / "link.bin")
    os.symlink(tmp_path, tmp_path / "in" / "folder")
    os.mkfifo(tmp_path / "in" / "pipe")
    seen = survey({"data": tmp_path / "in", "data/gone": tmp_path / "gone"})
    assert [file.name for file in seen.files] == ["data/real.bin"]
    assert {Path(refusal.path).name: refusal.code for refusal in seen.refusals} == {
        "a\nb": "pack.name",
        "link.bin": "pack.link",
        "folder": "pack.link",
        "pipe": "pack.device",
        "gone": "pack.unreadable",
    }


@pytest.mark.parametrize("how", ["longer", "shorter", "other content", "another file", "a link", "gone"])
def test_a_file_changed_between_survey_and_packing_is_refused(tmp_path: Path, how: str) -> None:
    path = write(tmp_path, {"x.bin": b"1234", "other": b"4321"}) / "x.bin"
    pack = Pack(survey({"data/x.bin": path}))
    if how in ("longer", "shorter", "other content"):
        path.write_bytes({"longer": b"12345", "shorter": b"1", "other content": b"4321"}[how])
        os.utime(path, (1, 1))
    else:
        path.unlink()
    if how == "another file":
        shutil.copy2(tmp_path / "other", path)
    if how == "a link":
        path.symlink_to(tmp_path / "other")
    with refusal(UsageError, "pack.changed", "x.bin"):
        list(pack.stream())
    assert pack.manifest_sha256 is None


def test_a_read_of_a_file_swapped_in_meanwhile_is_not_packed(tmp_path: Path) -> None:
    """A file may be swapped for the read and then restored: only the read itself can notice that."""
    folder = write(tmp_path, {"x.bin": b"1234", "other": b"4321"})
    (file,) = survey({"data/x.bin": folder / "x.bin"}).files
    (folder / "x.bin").rename(folder / "kept")
    (folder / "other").rename(folder / "x.bin")
    with refusal(UsageError, "pack.changed", "x.bin"):
        content_at(file, 0, 4)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"x.bin": os.urandom(6 << 20)}) / "x.bin"
    pack = Pack(survey({"data/x.bin": path}))
    stream = pack.stream("gzip")
    next(stream)
    next(stream)
    with open(path, "r+b") as out:
        out.write(b"changed")
    with refusal(UsageError, "pack.changed", "x.bin"):
        list(stream)


def test_a_file_that_cannot_be_read_any_more_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pack = Pack(survey({"data": write(tmp_path / "data", {"x.bin": b"1234"})}))
    monkeypatch.setattr(os, "pread", broken)
    with refusal(UsageError, "pack.unreadable", "x.bin", "Input/output error"):
        list(pack.stream())


def test_a_failing_pack_leaves_nothing_on_the_far_side(tmp_path: Path) -> None:
    from conftest import Box

    box = Box(tmp_path / "box")
    path = write(tmp_path, {"a.bin": os.urandom(4 << 20), "b.bin": b"1"}) / "b.bin"
    seen = survey({"data/a.bin": tmp_path / "a.bin", "data/b.bin": path})
    path.write_bytes(b"22")
    with refusal(UsageError, "pack.changed", "b.bin"):
        box.far.unpack(Pack(seen))
    assert not (box.folder / "data").exists()
    assert not (box.folder / "agent" / "shipped.json").exists()


def test_memory_does_not_grow_with_the_pack(tmp_path: Path) -> None:
    with open(tmp_path / "big.bin", "wb") as out:
        out.truncate(256 << 20)
    script = (
        "import sys\nfrom pathlib import Path\nfrom gpurun.remote.archive import Pack, survey\n"
        "from tests.memory import own_peak_bytes\n"
        "before = own_peak_bytes()\n"
        "for _ in Pack(survey({'data': Path(sys.argv[1])})).stream(): pass\n"
        "print(own_peak_bytes() - before)"
    )
    argv = [sys.executable, "-c", script, tmp_path]
    printed = subprocess.run(argv, capture_output=True, check=True, cwd=ROOT).stdout
    assert 0 < int(printed) < 100e6
