"""Tests of an upload in parts: a pack is put in place whole and verified, or not at all, and inside its folder only."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Box
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.core.errors import UsageError
from gpurun.remote.agent import finish_upload, receive
from gpurun.remote.agent.receive import Incoming
from gpurun.remote.archive import Codec, Pack, survey
from gpurun.remote.interface import FarRefusal
from tests.later import examples
from tests.refusals import refusal

ROOT = Path(__file__).parents[3]
HEAD = struct.Struct(">QII32s")
END = HEAD.pack((1 << 64) - 1, 0, 0, bytes(32))
PART_BYTES = 1000
SHA = "0" * 64
GOOD = {"bundle/a.py": b"print(1)", "data/empty": b"", "data/x.bin": random.Random(3).randbytes(3500)}


class Wire:
    """A sender that calls the three verbs of docs/FORMATS.md by itself, so that it can send wrong data."""

    def __init__(self, box: Box, files: dict[str, bytes], changes: dict[str, Any] | None = None) -> None:
        self.box, self.files = box, files
        named = [[name, len(content)] for name, content in files.items()]
        layout = {"v": 1, "part_bytes": PART_BYTES, "files": named, **(changes or {})}
        self.layout = json.dumps(layout).encode()
        self.id = hashlib.sha256(self.layout).hexdigest()
        content = b"".join(files.values())
        self.parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]

    def begin(self, held: str = "ask") -> str:
        return self._ask("begin", self.layout, "--held", held, "--sha256", self.id)

    def verified(self) -> list[int]:
        """Return the numbers of the parts that the machine already has."""
        argv = self.box.agent_argv("begin", "--held", "settled", "--sha256", self.id)
        lines = self.box.machine.call(argv, stdin=[self.layout], timeout_s=20).stdout.splitlines()[1:]
        return [int(line.split()[0]) for line in lines]

    def receive(self, stream: bytes) -> str:
        return self._ask("receive", stream, "--codec", "gzip", "--sha256", self.id)

    def settle(self, **changes: Any) -> str:
        files = [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in self.files.items()
        ]
        said = {"files": files, "parts": [hashlib.sha256(part).hexdigest() for part in self.parts], **changes}
        content = json.dumps(said["parts"]).encode() + b"\n" + json.dumps({"v": 1, "files": said["files"]}).encode()
        return self._ask("settle", content, "--layout", self.id, "--sha256", hashlib.sha256(content).hexdigest())

    def frame(self, index: int, part: bytes | None = None, **changes: Any) -> bytes:
        content = self.parts[index] if part is None else part
        data = changes.get("data", gzip.compress(content))
        sha256 = changes.get("sha256", hashlib.sha256(content).digest())
        return HEAD.pack(index, changes.get("size", len(content)), len(data), sha256) + data

    @property
    def stream(self) -> bytes:
        return b"".join(map(self.frame, range(len(self.parts)))) + END

    def _ask(self, verb: str, content: bytes, *options: str) -> str:
        """Call the verb; return the code of its refusal, or an empty text if there is none."""
        reply = self.box.machine.call(self.box.agent_argv(verb, *options), stdin=[content], timeout_s=20)
        answer = json.loads(reply.stdout.splitlines()[0])
        assert reply.exit_code == (1 if "error" in answer else 0)
        return str(answer["error"]["code"]) if "error" in answer else ""


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def shipped_tree(box: Box) -> dict[str, bytes]:
    """Return the files in place, once the agent has noted that they are on the disk."""
    record = box.folder / "agent" / "shipped.json"
    box.until(lambda: not (record.exists() and "boot" in json.loads(record.read_text())), limit_s=120)
    kept = ("bundle/", "data/", "agent/shipped.json")
    return {name: content for name, content in tree(box.folder).items() if name.startswith(kept)}


def test_files_that_came_in_parts_are_in_place_as_they_were(box: Box) -> None:
    wire = Wire(box, GOOD)
    assert (wire.begin(), wire.receive(wire.stream)) == ("", "")
    assert shipped_tree(box) == {}, "nothing is in place before all of it is settled"
    assert wire.settle() == ""
    assert {name: content for name, content in shipped_tree(box).items() if "shipped" not in name} == GOOD
    assert not (box.folder / ".incoming").exists()


NAMES = {
    **dict.fromkeys(("data/../../escaped", "/etc/escaped", "data//escaped", "agent/job.json", "agent.pyz"), "bad_name"),
    **dict.fromkeys(("data/./x", "data/a\nb", "data/a\\b", "data", "data/", "data/x.bin/y", ""), "bad_name"),
}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_could_leave_the_folder_is_refused(box: Box, name: str) -> None:
    outside = tree(box.folder.parent)
    assert Wire(box, {**GOOD, name: b"x"}).begin() == NAMES[name]
    left = {name for name in tree(box.folder.parent) if not name.startswith("box/agent/")}
    assert left == {name for name in outside if not name.startswith("box/agent/")}
    wire = Wire(box, GOOD)
    wire.begin()
    wire.receive(wire.stream)
    entry = {"name": name, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    assert wire.settle(files=[entry]) in ("bad_name", "os_error"), "nor is it believed in the manifest"
    assert shipped_tree(box) == {}


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "the same name twice": ({"files": [["data/x", 1], ["data/x", 1]]}, "duplicate"),
    "less than nothing": ({"files": [["data/x", -1]]}, "usage"),
    "no number": ({"files": [["data/x", "1"]]}, "usage"),
    "parts of nothing": ({"part_bytes": 0}, "usage"),
    "parts too large": ({"part_bytes": 1 << 30}, "usage"),
    "more files than may be": ({"files": [[f"data/{n}", 0] for n in range(100_001)]}, "too_many"),
    "more than fits": ({"files": [["data/x", 1 << 60]]}, "disk_full"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_makes_no_sense_is_refused(box: Box, case: str) -> None:
    changes, code = LAYOUTS[case]
    assert Wire(box, GOOD, changes).begin() == code
    assert not (box.folder / ".incoming").exists()


FRAMES: dict[str, tuple[Callable[[Wire], bytes], str]] = {
    "a part that is not in the layout": (lambda w: w.frame(4, b"x"), "too_big"),
    "a part that is too long": (lambda w: w.frame(0, b"x" * 1001), "too_big"),
    "more inside than was told": (lambda w: w.frame(0, data=gzip.compress(bytes(1 << 20))), "wrong_digest"),
    "less inside than was told": (lambda w: w.frame(0, data=gzip.compress(b"x")), "wrong_digest"),
    "another content": (lambda w: w.frame(0, data=gzip.compress(b"x" * 1000)), "wrong_digest"),
    "no gzip": (lambda w: w.frame(0, data=b"x" * 99), "cut_stream"),
    "more sent than makes sense": (lambda w: HEAD.pack(0, 1000, 1 << 30, bytes(32)), "too_big"),
    "no end": (lambda w: w.frame(0), "cut_stream"),
}


@pytest.mark.parametrize("case", FRAMES)
def test_a_part_that_is_not_as_declared_is_refused(box: Box, case: str) -> None:
    make, code = FRAMES[case]
    wire = Wire(box, GOOD)
    wire.begin()
    assert wire.receive(wire.frame(1) + make(wire)) == code
    assert wire.verified() == ([0, 1] if case == "no end" else [1])
    assert wire.settle() == "wrong_digest"
    assert shipped_tree(box) == {}


def test_a_stream_that_is_cut_anywhere_leaves_nothing_half_there(box: Box) -> None:
    wire, length = Wire(box, GOOD), 0
    wire.begin()
    ends = [sum(len(wire.frame(index)) for index in range(count)) for count in range(len(wire.parts) + 1)]
    for length in [0, 1, HEAD.size, ends[1] - 1, ends[1], ends[2] + 30, ends[4], ends[4] + 1]:
        assert wire.receive(wire.stream[:length]) == "cut_stream"
        assert wire.verified() == [index for index in range(4) if ends[index + 1] <= length], "what came whole counts"
        assert shipped_tree(box) == {}
    assert wire.settle() == ""


def listed_file(name: str, size_bytes: int) -> dict[str, Any]:
    return {"name": name, "bytes": size_bytes, "sha256": "0" * 64}


LYING: dict[str, tuple[dict[str, Any], str]] = {
    "a part too few": ({"parts": []}, "wrong_digest"),
    "another part": ({"parts": ["0" * 64] * 4}, "wrong_digest"),
    "a file too few": ({"files": []}, "wrong_digest"),
    "another size": ({"files": [listed_file("bundle/a.py", 8), listed_file("data/x.bin", 1)]}, "wrong_digest"),
    "a file that never came": ({"files": [listed_file("data/y", 5)]}, "wrong_digest"),
    "no list": ({"files": 1}, "usage"),
}


@pytest.mark.parametrize("case", LYING)
def test_a_pack_unlike_its_manifest_is_refused_and_the_old_stays(box: Box, case: str) -> None:
    before = Wire(box, {"bundle/old.py": b"old"})
    before.begin()
    before.receive(before.stream)
    assert before.settle() == ""
    kept = shipped_tree(box)
    wire = Wire(box, GOOD)
    wire.begin("settled")
    wire.receive(wire.stream)
    changes, code = LYING[case]
    assert wire.settle(**changes) == code
    assert shipped_tree(box) == kept


def test_a_file_that_was_cut_after_it_came_is_not_put_in_place(box: Box) -> None:
    """Another program on the machine, or a failing disk, may damage a file after its parts were verified."""
    wire = Wire(box, GOOD)
    wire.begin()
    wire.receive(wire.stream)
    os.truncate(box.folder / ".incoming" / wire.id / "files/data/x.bin", 3000)
    assert wire.settle() == "wrong_digest"
    assert shipped_tree(box) == {}


def test_a_link_in_the_way_is_not_written_through(box: Box, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours")
    wire = Wire(box, GOOD)
    wire.begin()
    place = box.folder / ".incoming" / wire.id / "files/data/x.bin"
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    assert wire.receive(wire.stream) == "os_error"
    assert outside.read_bytes() == b"not ours"


def test_a_list_that_is_cut_is_not_taken_for_the_whole(box: Box) -> None:
    wire = Wire(box, GOOD)
    whole, wire.layout = wire.layout, wire.layout[:-1]
    assert wire.begin() == "cut_stream"
    wire.layout = whole
    assert wire.receive(wire.stream) == "no_layout", "nothing was begun"


def test_parts_that_came_before_a_reboot_do_not_count(box: Box) -> None:
    wire = Wire(box, GOOD)
    wire.begin()
    wire.receive(wire.stream)
    log = box.folder / ".incoming" / wire.id / "verified"
    log.write_text(log.read_text().replace("boot ", "boot other-"))
    assert wire.verified() == []


def test_a_sender_that_falls_silent_is_given_up(box: Box) -> None:
    box.alter_agent("STALL_S = 120", "STALL_S = 1")
    wire = Wire(box, GOOD)
    wire.begin()

    def slow() -> Iterator[bytes]:
        yield wire.stream[:100]
        while box.living():  # The agent may need a while to start and to give up.
            time.sleep(0.05)

    argv = box.agent_argv("receive", "--codec", "gzip", "--sha256", wire.id)
    reply = box.machine.call(argv, stdin=slow(), timeout_s=20)
    error = json.loads(reply.stdout)["error"]
    assert (error["code"], "1 s" in error["message"]) == ("cut_stream", True)
    assert shipped_tree(box) == {}


# Both sides together


def test_a_machine_without_zstd_is_sent_gzip(box: Box) -> None:
    box.alter_agent('"compression.zstd", "backports.zstd", "zstandard"', "")
    box.alter_agent('zstd_module() or shutil.which("zstd")', "False")
    assert box.far.unpack(Pack(survey({"data/x.bin": bytes(3 << 20)}))).bytes == 3 << 20
    assert (box.folder / "data/x.bin").stat().st_size == 3 << 20


def test_a_machine_whose_python_has_no_zstd_uses_the_program(box: Box) -> None:
    if shutil.which("zstd") is None:
        pytest.skip("there is no zstd here")
    box.alter_agent('"compression.zstd", "backports.zstd", "zstandard"', "")
    content = random.Random(1).randbytes(3 << 19)
    box.far.unpack(Pack(survey({"data/x.bin": content})))
    assert (box.folder / "data/x.bin").read_bytes() == content


def test_reshipping_the_same_is_harmless_and_another_pack_is_not(box: Box) -> None:
    seen = survey({"bundle/a.py": b"1", "data/x.bin": b"22"})
    first = box.far.unpack(pack := Pack(seen))
    assert box.far.unpack(Pack(seen)).manifest_sha256 == first.manifest_sha256
    assert box.far.hello(python="/no/python").shipped_sha256 == pack.manifest_sha256
    box.far.start(box.job("pass"))
    assert box.far.unpack(again := Pack(seen), "gzip").manifest_sha256 == first.manifest_sha256
    assert (again.sent_bytes, again.manifest_sha256) == (0, pack.manifest_sha256)
    with refusal(FarRefusal, "far.started"):
        box.far.unpack(Pack(survey({"bundle/a.py": b"2"})))
    assert (box.folder / "bundle/a.py").read_bytes() == b"1"


def test_a_new_pack_replaces_the_old_and_resends_no_common_part(box: Box) -> None:
    shard = random.Random(4).randbytes(2 << 20)
    box.far.unpack(Pack(survey({"bundle/a.py": b"1", "data/x.bin": shard})))
    box.far.unpack(pack := Pack(survey({"bundle/b.py": b"3", "data/y.bin": shard})))
    assert {*shipped_tree(box)} == {"bundle/b.py", "data/y.bin", "agent/shipped.json"}
    assert (box.folder / "data/y.bin").read_bytes() == shard
    assert pack.sent_bytes < 1000


def test_what_was_altered_over_there_is_sent_again(box: Box) -> None:
    shard = random.Random(5).randbytes(2 << 20)
    box.far.unpack(Pack(survey({"bundle/a.py": b"1", "data/x.bin": shard})))
    (box.folder / "data" / "x.bin").write_bytes(bytes(2 << 20))
    box.far.unpack(Pack(survey({"bundle/a.py": b"2", "data/x.bin": shard})))
    assert (box.folder / "data" / "x.bin").read_bytes() == shard


def test_a_crash_while_placing_costs_no_second_sending(box: Box) -> None:
    seen = survey({"bundle/a.py": b"1", "data/x.bin": random.Random(6).randbytes(2 << 20)})
    first = box.far.unpack(Pack(seen))
    (box.folder / "agent" / "shipped.json").unlink()  # A crash leaves all but the last record.
    assert box.far.unpack(pack := Pack(seen)).manifest_sha256 == first.manifest_sha256
    assert pack.sent_bytes == 0


def test_of_as_many_files_as_a_pack_may_have_none_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "last.bin").write_bytes(b"x")
    files = [{"name": f"data/{'x' * 60}/{number:06d}.bin", "bytes": 1, "sha256": SHA} for number in range(99_999)]
    files.append({"name": "data/last.bin", "bytes": 1, "sha256": SHA})
    (tmp_path / "agent" / "pack.json").write_text(json.dumps({"files": files}))
    assert receive.held_files(str(tmp_path)) == {SHA: (str(tmp_path / "data" / "last.bin"), 1)}


def test_a_disk_without_links_gets_copies_of_what_a_bucket_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard links fail over SMB, and between folders on some clusters' file systems: the agent must copy instead."""

    def unlinkable(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    content = random.Random(1).randbytes(3 << 20)
    sha256 = hashlib.sha256(content).hexdigest()
    layout = {"part_bytes": 1 << 20, "files": [], "v": 1}
    for folder in ("agent", ".pulled", ".incoming/x/files"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".pulled" / sha256).write_bytes(content)
    (tmp_path / ".incoming/x/layout.json").write_text(json.dumps(layout))
    monkeypatch.setattr(os, "link", unlinkable)
    entries = [{"name": "data/a.bin", "bytes": len(content), "sha256": sha256}]
    (tmp_path / ".incoming/x/files/data").mkdir()
    (tmp_path / ".incoming/x/files/data/a.bin").write_bytes(content[: 1 << 20])  # A crash left half a copy.
    finish_upload.complete_files(str(tmp_path), Incoming(str(tmp_path / ".incoming/x")), entries)
    assert (tmp_path / ".incoming/x/files/data/a.bin").read_bytes() == content


def test_a_file_torn_by_a_reboot_is_resent_and_not_trained_on(box: Box) -> None:
    shards = {f"data/{name}.bin": random.Random(name).randbytes(2 << 20) for name in "ab"}
    seen, record = survey({"bundle/a.py": b"1", **shards}), box.folder / "agent" / "shipped.json"
    box.far.unpack(Pack(seen))
    given_up = time.monotonic() + 120
    while "boot" in json.loads(record.read_text()):
        assert time.monotonic() < given_up, "it never came onto the disk"
        time.sleep(0.02)
    record.write_text(json.dumps({**json.loads(record.read_text()), "boot": "the one before"}))
    (box.folder / "data" / "a.bin").write_bytes(bytes(2 << 20))
    assert box.far.hello(python="/no/python").shipped_sha256 is None
    with refusal(FarRefusal, "far.not_shipped", "bundle"):
        box.far.start(box.job("pass"))
    box.far.unpack(pack := Pack(seen))
    assert (box.folder / "data" / "a.bin").read_bytes() == shards["data/a.bin"]
    assert pack.sent_bytes < 3 << 20, "the other one is not sent again"


def test_a_failing_pack_places_nothing_and_keeps_what_came(box: Box, tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(random.Random(name).randbytes(3 << 20))
    seen = survey({"data/a.bin": tmp_path / "a.bin", "data/b.bin": tmp_path / "b.bin"})
    box.far.ask, ask = lambda verb, *rest, **more: ask(verb, *rest, **more) if verb != "settle" else 1 / 0, box.far.ask  # type: ignore
    with pytest.raises(ZeroDivisionError):
        box.far.unpack(Pack(seen))
    assert shipped_tree(box) == {}
    box.far.ask = ask  # type: ignore[method-assign]
    box.far.unpack(pack := Pack(seen))
    assert pack.sent_bytes == 0, "another process, which reads the files again, finds all parts there"
    (tmp_path / "b.bin").write_bytes(b"22")
    with refusal(UsageError, "pack.changed", "b.bin"):
        box.far.unpack(Pack(seen))


def test_a_file_changed_after_it_was_sent_is_not_put_in_place(box: Box, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(3 << 20))
    ask, asked = box.far.ask, list[str]()

    def changes(verb: str, *rest: Any, **more: Any) -> Any:
        asked.append(verb)
        answer = ask(verb, *rest, **more)
        (tmp_path / "x.bin").write_bytes(b"333")
        return answer

    box.far.ask, box.far.lanes = changes, lambda most, least: [box.far]  # type: ignore[method-assign, assignment]
    with refusal(UsageError, "pack.changed", "x.bin"):
        box.far.unpack(Pack(survey({"data": tmp_path})))
    assert "settle" not in asked
    assert shipped_tree(box) == {}


PART = st.text(st.sampled_from("abcXYZ09 _-+@=é漢"), min_size=1, max_size=12).filter(
    lambda part: part.strip(". ") == part
)
TREES = st.dictionaries(
    st.lists(PART, min_size=1, max_size=3).map("/".join), st.binary(max_size=3000), min_size=1, max_size=8
).filter(lambda tree: not any(b.startswith(a + "/") for a in tree for b in tree))


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=TREES, codec=st.sampled_from(["zstd", "gzip"]))
def test_what_arrives_is_what_was_packed(box: Box, files: dict[str, bytes], codec: Codec) -> None:
    source = box.folder.parent / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    shipped = box.far.unpack(Pack(survey({"data": source})), codec)
    assert tree(box.folder / "data") == files
    assert (shipped.files, shipped.bytes) == (len(files), sum(map(len, files.values())))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_on_either_side_does_not_grow_with_the_transfer(tmp_path: Path) -> None:
    with open(tmp_path / "big.bin", "wb") as out:
        out.truncate(128 << 20)
    with open(tmp_path / "big.bin", "rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    file = {"name": "big.bin", "bytes": 128 << 20, "sha256": sha256, "kind": "sample", "step": 1}
    (tmp_path / "box" / "out").mkdir(parents=True)
    (tmp_path / "box" / "out" / "MANIFEST.json").write_text(
        json.dumps({"v": 1, "latest": 1, "best": None, "files": [file]})
    )
    os.link(tmp_path / "big.bin", tmp_path / "box" / "out" / "big.bin")
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom tests.memory import own_peak_bytes\n"
        "from gpurun.remote.client import FarSide\nfrom gpurun.remote.local_machine import LocalMachine\n"
        "from gpurun.remote.archive import Pack, survey\n"
        "here = Path(sys.argv[1])\n"
        "far = FarSide(LocalMachine(here / 'box', 'gr-test'), python=sys.executable)\n"
        "far.install_agent()\nfar.unpack(Pack(survey({'data/big.bin': here / 'big.bin'})))\n"
        "far.fetch('big.bin', 128 << 20, sys.argv[2], here / 'home')\n"
        "print(own_peak_bytes(), 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    argv = [sys.executable, "-c", script, tmp_path, sha256]
    peaks = [int(peak) for peak in subprocess.run(argv, capture_output=True, check=True, cwd=ROOT).stdout.split()]
    assert max(peaks) < 120e6, peaks
    for copy in ("box/data/big.bin", "home/big.bin"):
        assert (tmp_path / copy).stat().st_size == 128 << 20
