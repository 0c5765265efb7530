"""Tests of a hostile machine: gpurun checks everything that it sends, and no name from it becomes a path."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpurun.core.errors import CollectFailed
from gpurun.remote import download as fetching
from gpurun.remote.client import FarSide
from gpurun.remote.download import MOST_FRUITLESS, PARTIAL_FOLDER
from gpurun.remote.interface import FarRefusal, MachineLost, Reply, Take
from gpurun.remote.messages import Manifest, check_name, understood_manifest
from tests.refusals import refusal

SHA = "0" * 64


class Liar:
    """A machine whose agent replies with what the test returns for a call."""

    def __init__(self, answer: Callable[[list[str]], bytes], exit_code: int = 0) -> None:
        self.answer, self.exit_code, self.calls = answer, exit_code, 0

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        self.calls += 1
        said = self.answer(list(argv))
        if sink is None:
            return Reply(self.exit_code, said, b"")
        for at in range(0, len(said), 700):
            sink(said[at : at + 700])
        return Reply(self.exit_code, b"", b"")

    def lane(self) -> Liar:
        return self

    def close(self) -> None:
        pass

    round_trip_s = 0.0

    def put(self, path: str, content: bytes) -> None:
        pass


class Files(Liar):
    """An agent that serves files; a test may damage, cut or lose its replies."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(self.get)
        self.files = files
        self.damage: Callable[[int, bytes], bytes] = lambda call, data: data
        self.asked: list[int] = []

    def get(self, argv: list[str]) -> bytes:
        options = dict(zip(argv[5::2], argv[6::2], strict=False))
        name, offset, most = options["--name"], int(options["--offset"]), int(options["--most"])
        self.asked.append(offset)
        data = self.damage(len(self.asked), self.files[name][offset : offset + min(most, 1000)])
        head = {"name": name, "offset": offset, "bytes": len(data), "size": len(self.files[name])}
        return json.dumps(head).encode() + b"\n" + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "checkpoints/1.state.json", "bytes": 1, "sha256": SHA, "kind": "state", "step": 1, **changes}


def manifest(*files: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({"v": 1, "latest": 1, "best": {"step": 1, "val_loss": 2.5}, "files": files, **changes}).encode()


NAMES = [
    *(
        "../x",
        "..",
        ".",
        "",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "a/",
        "/a",
        "a/b/c/d/e/f/g/h/i/j",
        "a\nb",
        "a\0b",
        "a b",
        "a\\b",
        "C:x",
    ),
    *("CON", "con.txt", "checkpoints/NUL", "aux.json", "COM1", "lpt9.bin", ".hidden", "a/.hidden", "trailing.", "é"),
    *("x" * 81, "a\x1b[2J", "~/x", "a%2fb", "-" * 90),
]

HOSTILE = [
    *(manifest(entry(name=name)) for name in NAMES),
    *(
        manifest(entry(), entry()),
        manifest(entry(name="A"), entry(name="a")),
        manifest(entry(name="a"), entry(name="a/b")),
    ),
    *(manifest(entry(bytes=size)) for size in (-1, 2**60, 2**80, 1.5, "1", True, None)),
    *(manifest(entry(sha256=sha)) for sha in ("", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n", None)),
    *(manifest(entry(kind="pickle")), manifest(entry(extra=1)), manifest(extra=1), manifest(v=2), manifest(latest="x")),
    *(
        manifest(best={"step": 1, "val_loss": float("nan")}),
        manifest(best={}),
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"{" * 9999,
    ),
    *(b"[" * 200_000, b'{"v": 1, "files": [' + b"{}," * 1_000_001 + b"{}]}"),
    *(manifest(*[entry(name=f"f{i}", bytes=600) for i in range(2)]), manifest(entry())[:-1]),
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: ascii(content[:100]))
def test_a_hostile_manifest_is_rejected_whole(content: bytes) -> None:
    with pytest.raises(FarRefusal) as refused:
        understood_manifest(content, most_bytes=1000)
    assert refused.value.reason in ("nonsense", "bad_manifest")
    assert refused.value.what.isprintable()


def test_an_honest_manifest_is_understood() -> None:
    found = understood_manifest(manifest(entry(), entry(name="samples/s-1.txt", kind="sample")), most_bytes=1000)
    assert [file.name for file in found.files] == ["checkpoints/1.state.json", "samples/s-1.txt"]
    assert found.best is not None
    assert (found.latest, found.best.val_loss, found.total_bytes) == (1, 2.5, 2)
    assert understood_manifest(manifest(best=None, latest=None), 0).files == ()


def test_before_anything_is_finished_there_is_an_empty_manifest() -> None:
    no = Liar(lambda argv: b'{"error": {"code": "no_manifest", "message": "none yet"}}\n', exit_code=1)
    assert FarSide(no).manifest(1000) == Manifest()


def test_a_manifest_that_was_cut_on_its_way_is_not_believed() -> None:
    whole = manifest(entry())
    head = json.dumps({"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}).encode() + b"\n"
    assert len(FarSide(Liar(lambda argv: head + whole)).manifest(1000).files) == 1
    for content in (whole[:-1], whole + b" ", whole.replace(b"0", b"1", 1)):
        with refusal(FarRefusal, "far.nonsense"):
            FarSide(Liar(lambda argv, content=content: head + content)).manifest(1000)


STATUS = {
    **dict.fromkeys(("pid", "started_wall", "exit_code", "signal", "stop_reason", "soft_stop_wall", "hard_stop_wall")),
    "v": 1,
    "state": "idle",
    "wall": 1.0,
}


def polled(content: bytes = b"", status: object = STATUS, **piece: Any) -> bytes:
    chunk = {"name": "events.jsonl", "offset": 5, "bytes": len(content), "size": 99, **piece}
    return json.dumps({"status": status, "chunks": [chunk]}).encode() + b"\n" + content


LIES = [
    *(b"", b"\n", b"no json\n", b"{}\n", b"x" * (2 << 20), b"\xff\n", polled(b"abc", name="trainer.log")),
    *(
        polled(b"abc", offset=4),
        polled(b"abc", bytes=4),
        polled(b"abc", bytes=2),
        polled(b"a" * 11),
        polled(b"abc", bytes=-1),
    ),
    *(polled(status={**STATUS, "state": "fine"}), polled(status={**STATUS, "wall": "now"}), polled(status=None)),
    *(
        polled(status={**STATUS, "stop_reason": "x" * 600}),
        polled(status={**STATUS, "extra": 1}),
        polled(b"", size=1e9),
    ),
    json.dumps({"status": STATUS, "chunks": []}).encode() + b"\n",
]


@pytest.mark.parametrize("answer", LIES, ids=lambda answer: ascii(answer[-60:]))
def test_a_poll_that_does_not_answer_what_was_asked_is_nonsense(answer: bytes) -> None:
    with pytest.raises(FarRefusal) as refused:
        FarSide(Liar(lambda argv: answer)).poll({"events.jsonl": (5, 10)})
    assert refused.value.reason == "nonsense"


def test_a_refusal_keeps_its_code_and_a_broken_agent_its_words() -> None:
    full = b'{"error": {"code": "disk_full", "message": "9 bytes are needed", "needed_bytes": 9}}\n'
    with refusal(FarRefusal, "far.disk_full", "9 bytes") as refused:
        FarSide(Liar(lambda argv: full, exit_code=1)).stop()
    assert (refused.value.reason, refused.value.code, refused.value.needed_bytes) == ("disk_full", "far.disk_full", 9)
    for words in (b"", b"Traceback", b'{"error": {"code": "\\u001b[2J", "message": ""}}\n', b'{"error": 1}\n'):
        with pytest.raises(FarRefusal) as refused:
            FarSide(Liar(lambda argv, words=words: words, exit_code=1)).stop()
        assert refused.value.reason == "broken"


def test_there_is_a_crash_point_on_either_side_of_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURUN_CRASH_LOG", str(tmp_path / "passed"))
    far = FarSide(Liar(lambda argv: b'{"keeper_pid": 1, "already": false, "started_wall": 1.0}\n'))
    far.start({})
    with pytest.raises(FarRefusal):
        far.poll({})
    passed = [line.partition(" ")[2] for line in (tmp_path / "passed").read_text().splitlines()]
    assert passed == [f"{side} far.{verb}" for verb in ("put", "start", "poll") for side in ("before", "after")]


CONTENT = bytes(range(256)) * 20
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def bring(files: Files, into: Path, name: str = "checkpoints/a.bin", size: int = len(CONTENT)) -> Path:
    return FarSide(files).fetch(name, size, DIGEST, into)


def test_a_file_comes_home_in_parts_and_only_once(tmp_path: Path) -> None:
    files = Files({"checkpoints/a.bin": CONTENT})
    seen: list[int] = []
    path = FarSide(files).fetch("checkpoints/a.bin", len(CONTENT), DIGEST, tmp_path, on_progress=seen.append)
    assert path == tmp_path / "checkpoints" / "a.bin"
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert {1000, 2000, 3000, 4000, 5000, 5120} <= set(seen)
    assert bring(files, tmp_path) == path
    assert len(files.asked) == 6, "what is here is not asked for again"
    assert list((tmp_path / PARTIAL_FOLDER).iterdir()) == []


def test_a_download_that_broke_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    files = Files({"checkpoints/a.bin": CONTENT})

    def lose(call: int, data: bytes) -> bytes:
        if 3 <= call < 3 + MOST_FRUITLESS:
            raise MachineLost("gone")
        return data

    files.damage = lose
    with pytest.raises(MachineLost):
        bring(files, tmp_path)
    assert not (tmp_path / "checkpoints" / "a.bin").exists()
    assert bring(files, tmp_path).read_bytes() == CONTENT
    assert files.asked == [0, 1000, *[2000] * MOST_FRUITLESS, 2000, 3000, 4000, 5000]


def test_a_wrong_digest_is_fetched_three_times_and_given_up(tmp_path: Path) -> None:
    files = Files({"checkpoints/a.bin": CONTENT})
    files.damage = lambda call, data: b"!" + data[1:] if call <= 6 else data
    assert bring(files, tmp_path).read_bytes() == CONTENT
    assert len(files.asked) == 12
    (tmp_path / "checkpoints" / "a.bin").unlink()
    files.damage = lambda call, data: b"!" + data[1:]
    with refusal(CollectFailed, "collect.wrong_digest"):
        bring(files, tmp_path)
    assert len(files.asked) == 12 + 4 * 6
    assert not (tmp_path / "checkpoints" / "a.bin").exists()


def test_a_file_of_unannounced_length_does_not_come_home(tmp_path: Path) -> None:
    files = Files({"checkpoints/a.bin": CONTENT})
    for size in (len(CONTENT) + 1, len(CONTENT) - 1):
        with pytest.raises(CollectFailed):
            bring(files, tmp_path, size=size)
    files.damage = lambda call, data: data + b"\0" * (9 << 20)
    with refusal(FarRefusal, "far.nonsense", "another part"):
        bring(files, tmp_path)
    assert list(tmp_path.rglob("*.bin")) == []


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_no_name_of_the_instance_becomes_a_path_unchecked(tmp_path: Path, name: str) -> None:
    with pytest.raises(FarRefusal):
        check_name(name)
    files = Files({name: CONTENT})
    with pytest.raises(FarRefusal):
        bring(files, tmp_path / "artifacts", name)
    assert files.asked == []
    assert list(tmp_path.rglob("*")) == []


def test_a_link_in_the_way_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    outside, into = tmp_path / "outside", tmp_path / "artifacts"
    outside.write_bytes(b"mine")
    (into / "checkpoints").mkdir(parents=True)
    (into / "checkpoints" / "a.bin").symlink_to(outside)
    (into / PARTIAL_FOLDER).mkdir()
    (into / PARTIAL_FOLDER / DIGEST).symlink_to(outside)
    with refusal(CollectFailed, "collect.cannot_store", "a.bin", "Too many levels of symbolic links"):
        bring(Files({"checkpoints/a.bin": CONTENT}), into)
    (into / PARTIAL_FOLDER / DIGEST).unlink()
    assert not bring(Files({"checkpoints/a.bin": CONTENT}), into).is_symlink()
    assert outside.read_bytes() == b"mine"


def test_a_full_disk_here_says_so_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tmp_path / "checkpoints" / "good.bin"
    good.parent.mkdir()
    good.write_bytes(b"verified")
    files = Files({"checkpoints/a.bin": CONTENT})
    usage = fetching.shutil.disk_usage
    room = iter([10**9, 10**9, 10**9, 2999])  # A twentieth of the disk stays free.
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage(path)._replace(total=20_000, free=next(room)))
    with refusal(CollectFailed, "collect.disk_full", "120 bytes"):
        bring(files, tmp_path)
    assert good.read_bytes() == b"verified"
    assert (tmp_path / PARTIAL_FOLDER / DIGEST).stat().st_size == 3000
    monkeypatch.setattr(fetching.shutil, "disk_usage", usage)
    assert bring(files, tmp_path).read_bytes() == CONTENT
    assert files.asked == [0, 1000, 2000, 3000, 4000, 5000]


def test_a_write_that_fails_is_told_apart_from_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(fetching.os, "replace", Mock(side_effect=error))
    with refusal(CollectFailed, "collect.cannot_store", "Permission denied"):
        bring(Files({"checkpoints/a.bin": CONTENT}), tmp_path)
