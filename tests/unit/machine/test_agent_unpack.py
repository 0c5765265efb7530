"""What is shipped is in place whole and verified, or nothing of it is there; no entry can leave the folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Box
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.machine.base import FarRefusal
from gpurun.machine.pack import Codec, Pack, survey

Entry = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"x") -> Entry:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    return entry, content


def special(name: str, kind: bytes, link: str = "") -> Entry:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry, b""


def manifest_of(entries: list[Entry]) -> Entry:
    files = [
        {"name": entry.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for entry, content in entries
    ]
    return file(".manifest.json", json.dumps({"v": 1, "files": files}).encode())


def stream(entries: list[Entry]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for entry, content in entries:
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(out.getvalue())


def unpack(box: Box, content: bytes, limit: int = 1 << 20) -> str:
    """The refusal's code, or nothing."""
    argv = box.agent_argv("unpack", "--codec", "gzip", "--limit", str(limit))
    reply = box.machine.call(argv, stdin=[content], timeout_s=20)
    answer = json.loads(reply.stdout)
    assert reply.exit_code == (1 if "error" in answer else 0)
    return str(answer["error"]["code"]) if "error" in answer else ""


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def shipped_tree(box: Box) -> dict[str, bytes]:
    kept = ("bundle/", "data/", ".incoming", "agent/shipped.json")
    return {name: content for name, content in tree(box.folder).items() if name.startswith(kept)}


GOOD = [file("bundle/a.py", b"print(1)"), file("data/x.bin", bytes(3000))]

HOSTILE: dict[str, Callable[[], tuple[list[Entry], str]]] = {
    "up and out": lambda: ([*GOOD, file("data/../../escaped")], "bad_name"),
    "absolute": lambda: ([*GOOD, file("/etc/escaped")], "bad_name"),
    "absolute inside": lambda: ([*GOOD, file("data//escaped")], "bad_name"),
    "another folder": lambda: ([*GOOD, file("agent/job.json")], "bad_name"),
    "the agent itself": lambda: ([*GOOD, file("agent.pyz")], "bad_name"),
    "a dot": lambda: ([*GOOD, file("data/./x")], "bad_name"),
    "a control character": lambda: ([*GOOD, file("data/a\nb")], "bad_name"),
    "a backslash": lambda: ([*GOOD, file("data/a\\b")], "bad_name"),
    "a symbolic link": lambda: ([*GOOD, special("data/link", tarfile.SYMTYPE, "/etc/passwd")], "not_regular"),
    "a hard link": lambda: ([*GOOD, special("data/link", tarfile.LNKTYPE, "../agent.pyz")], "not_regular"),
    "a device": lambda: ([*GOOD, special("data/device", tarfile.CHRTYPE)], "not_regular"),
    "a pipe": lambda: ([*GOOD, special("data/pipe", tarfile.FIFOTYPE)], "not_regular"),
    "a folder": lambda: ([special("data", tarfile.DIRTYPE), *GOOD], "not_regular"),
    "the same name twice": lambda: ([*GOOD, file("data/x.bin")], "duplicate"),
    "a file as a folder": lambda: ([*GOOD, file("data/x.bin/y")], "os_error"),
    "more than was announced": lambda: ([*GOOD, file("data/big", bytes(1 << 20))], "too_big"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pack_is_refused_and_leaves_nothing(box: Box, case: str) -> None:
    entries, code = HOSTILE[case]()
    outside = tree(box.folder.parent)
    assert unpack(box, stream([*entries, manifest_of(entries)])) == code
    left = {name for name in tree(box.folder.parent) if not name.startswith("box/agent/")}
    assert left == {name for name in outside if not name.startswith("box/agent/")}


LYING: dict[str, Callable[[], tuple[list[Entry], str]]] = {
    "no manifest": lambda: (GOOD, "cut_stream"),
    "a file too few": lambda: ([GOOD[0], manifest_of(GOOD)], "wrong_digest"),
    "a file too many": lambda: ([*GOOD, file("data/y"), manifest_of(GOOD)], "wrong_digest"),
    "another content": lambda: ([GOOD[0], file("data/x.bin", b"\1" * 3000), manifest_of(GOOD)], "wrong_digest"),
    "something after the manifest": lambda: ([manifest_of(GOOD), *GOOD], "too_many"),
    "no JSON": lambda: ([*GOOD, file(".manifest.json", b"{")], "usage"),
}


@pytest.mark.parametrize("case", LYING)
def test_a_pack_that_is_not_as_its_manifest_says_is_refused_and_the_one_before_stays(box: Box, case: str) -> None:
    before = [file("bundle/old.py", b"old")]
    assert unpack(box, stream([*before, manifest_of(before)])) == ""
    kept = shipped_tree(box)
    entries, code = LYING[case]()
    assert unpack(box, stream(entries)) == code
    assert shipped_tree(box) == kept


def test_a_stream_that_is_cut_anywhere_leaves_nothing_half_there(box: Box) -> None:
    entries = [*GOOD, file("data/noise.bin", random.Random(1).randbytes(5000))]
    whole = stream([*entries, manifest_of(entries)])
    for length in [0, 1, 15, *range(100, len(whole), len(whole) // 12)]:
        assert unpack(box, whole[:length]) == "cut_stream", f"cut after {length} of {len(whole)} bytes"
        assert shipped_tree(box) == {}
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0x10
    assert unpack(box, bytes(damaged)) in ("cut_stream", "wrong_digest")
    assert shipped_tree(box) == {}
    assert unpack(box, whole) == ""


def test_a_cut_zstd_stream_is_refused_too(box: Box) -> None:
    pack = Pack(survey({"data/x.bin": random.Random(2).randbytes(300_000)}))
    whole = b"".join(pack.stream())
    for length in (len(whole) // 3, len(whole) - 600, len(whole) - 1):
        argv = [word for word in box.agent_argv("unpack", "--codec", "zstd", "--limit", "300000") if word != "-S"]
        reply = box.machine.call(argv, stdin=[whole[:length]], timeout_s=20)
        if length < len(whole) - 1:
            assert json.loads(reply.stdout)["error"]["code"] == "cut_stream"
    assert set(shipped_tree(box)) <= {"data/x.bin", "agent/shipped.json"}


def test_a_disk_that_is_too_small_is_told_with_the_size_that_is_needed(box: Box) -> None:
    argv = box.agent_argv("unpack", "--codec", "gzip", "--limit", str(1 << 60))
    error = json.loads(box.machine.call(argv, stdin=[b""], timeout_s=20).stdout)["error"]
    assert (error["code"], error["needed_bytes"]) == ("disk_full", 1 << 60)
    assert str(1 << 60) in error["message"]


def test_a_machine_without_zstd_is_sent_gzip(box: Box) -> None:
    box.alter_agent('"compression.zstd", "backports.zstd", "zstandard"', "")
    box.alter_agent('shutil.which("zstd") is None', "True")
    assert box.far.unpack(Pack(survey({"data/x.bin": bytes(3 << 20)}))).bytes == 3 << 20
    assert (box.folder / "data/x.bin").stat().st_size == 3 << 20


def test_unpacking_the_same_again_is_harmless_even_when_a_job_was_started_and_another_pack_is_not(box: Box) -> None:
    pack = Pack(survey({"bundle/a.py": b"1", "data/x.bin": b"22"}))
    first = box.far.unpack(pack)
    assert box.far.unpack(pack) == first
    assert box.far.hello(python="/no/python").shipped_sha256 == pack.manifest_sha256
    box.far.start(box.job("pass"))
    assert box.far.unpack(pack, "gzip") == first
    with pytest.raises(FarRefusal, match="a job was started here"):
        box.far.unpack(Pack(survey({"bundle/a.py": b"2"})))
    assert (box.folder / "bundle/a.py").read_bytes() == b"1"


def test_a_new_pack_replaces_the_old_one_whole(box: Box) -> None:
    box.far.unpack(Pack(survey({"bundle/a.py": b"1", "data/x.bin": b"2"})))
    box.far.unpack(Pack(survey({"bundle/b.py": b"3"})))
    assert set(shipped_tree(box)) == {"bundle/b.py", "agent/shipped.json"}


def test_a_sender_that_falls_silent_is_given_up(box: Box) -> None:
    box.alter_agent("STALL_S = 120", "STALL_S = 1")

    def slow() -> Iterator[bytes]:
        yield stream([*GOOD, manifest_of(GOOD)])[:100]
        time.sleep(2)

    argv = box.agent_argv("unpack", "--codec", "gzip", "--limit", "9999")
    reply = box.machine.call(argv, stdin=slow(), timeout_s=20)
    assert json.loads(reply.stdout)["error"]["message"] == "nothing came for 1 s"
    assert shipped_tree(box) == {}


PART = st.text(st.sampled_from("abcXYZ09 _-+@=é漢"), min_size=1, max_size=12).filter(
    lambda part: part.strip(". ") == part
)
TREES = st.dictionaries(
    st.lists(PART, min_size=1, max_size=3).map("/".join), st.binary(max_size=3000), min_size=1, max_size=8
).filter(lambda tree: not any(b.startswith(a + "/") for a in tree for b in tree))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=TREES, codec=st.sampled_from(["zstd", "gzip"]))
def test_what_is_unpacked_is_what_was_packed(box: Box, files: dict[str, bytes], codec: Codec) -> None:
    source = box.folder.parent / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    shipped = box.far.unpack(Pack(survey({"data": source})), codec)
    assert tree(box.folder / "data") == files
    assert (shipped.files, shipped.bytes) == (len(files), sum(map(len, files.values())))
