"""Tests of how a command's files are published for download: whole, once finished, and without unchanged uploads."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.artifact_names import path_of, raw_name
from gpurun.remote.agent.runner import published
from gpurun.remote.agent.runner.published import PublishedOutputs
from gpurun.remote.messages import understood_manifest


class Folder:
    """A command's folder with the outputs that are published from it."""

    def __init__(self, root: Path, *outputs: str, checkpoints: str = "") -> None:
        self.work, self.out = root / "work", root / "out"
        self.work.mkdir(exist_ok=True)
        self.events: list[dict[str, Any]] = []
        order = {"outputs": outputs, "checkpoints": checkpoints}
        self.outputs = PublishedOutputs(
            str(self.work), str(self.out), order, lambda kind, **more: self.events.append({"kind": kind, **more})
        )
        self._clock = 1_000_000_000

    def writes(self, name: str, content: str) -> None:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        self._clock += 1
        os.utime(path, (self._clock, self._clock))

    def looks(self, step: int, *, times: int = 1, is_last: bool = False) -> None:
        for _ in range(times):
            self.outputs.look(step, is_last)

    @property
    def kinds(self) -> dict[str, str]:
        """Return the kind of each file in the published manifest, by name."""
        path = self.out / "MANIFEST.json"
        if not path.exists():
            return {}
        return {event.name: event.kind for event in understood_manifest(path.read_bytes(), 1 << 40).files}

    @property
    def latest(self) -> int | None:
        return json.loads((self.out / "MANIFEST.json").read_text())["latest"]


def test_a_checkpoint_being_written_is_published_once_it_rests(tmp_path: Path) -> None:
    folder = Folder(tmp_path, checkpoints="ckpt.pt")
    for length in (1, 2, 3):
        folder.writes("ckpt.pt", "x" * length)
        folder.looks(step=10)
        assert folder.kinds == {}
    folder.looks(step=10)
    assert folder.kinds == {"outputs/ckpt.pt": "checkpoint"}
    folder.writes("ckpt.pt", "y" * 9)
    folder.looks(step=20)
    assert (folder.out / "outputs/ckpt.pt").read_text() == "xxx", "the whole one stays until the next is whole"
    folder.looks(step=20)
    assert ((folder.out / "outputs/ckpt.pt").read_text(), folder.latest) == ("y" * 9, 20)


def test_the_newest_whole_folder_is_latest_and_others_outputs(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path, checkpoints="out/checkpoint-*")
    for step in (100, 200):
        folder.writes(f"out/checkpoint-{step}/model.safetensors", "m" * step)
        folder.writes(f"out/checkpoint-{step}/optimizer.pt", "o" * step)
        folder.looks(step=step, times=2)
    folder.writes("out/checkpoint-300/model.safetensors", "half")
    folder.looks(step=300)
    assert folder.latest == 200
    kinds = folder.kinds
    assert {name for name, kind in kinds.items() if kind == "checkpoint"} == {
        "outputs/out/checkpoint-200/model.safetensors", "outputs/out/checkpoint-200/optimizer.pt",
    }  # fmt: skip
    assert kinds["outputs/out/checkpoint-100/optimizer.pt"] == "output"
    assert [event["step"] for event in folder.events if event["kind"] == "checkpoint"] == [100, 200]


def test_uploads_are_not_output_until_the_command_changes_them(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    for name in ("train.py", "log.txt"):
        (tmp_path / "work" / name).write_text("before")
    folder = Folder(tmp_path, "**")
    folder.looks(step=0, times=2)
    assert folder.kinds == {}
    folder.writes("log.txt", "more")
    folder.looks(step=0, is_last=True)
    assert folder.kinds == {"outputs/log.txt": "output"}


NAMES = (
    b"runs/2026-11-27 00:41:05/model.pt", b"ckpt[best]/m.pt", b"train loss", "模型/权重.pt".encode(), b"#best.pt",
    b"x" * 255, b".hydra/config.yaml", b"a/b/c/d/e/f/g/h/i/j/k", b"new\nline", b"\x1b[31m", "\u202egnp".encode(),
    b"bad\xff\xfe", b"100%.txt", b"a%20b", b"Case", b"case", b"CON", b"end.", b"-rf",
)  # fmt: skip


def test_every_name_that_linux_allows_is_published_byte_for_byte(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "**")
    for name in NAMES:
        path = os.fsencode(folder.work) + b"/" + name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(name)
    folder.looks(step=0, is_last=True)
    assert {raw_name(name) for name in folder.kinds} == {b"outputs/" + name for name in NAMES}
    assert all(path_of(folder.out, name).read_bytes() == raw_name(name)[8:] for name in folder.kinds)
    assert folder.outputs.unpublished == []
    assert folder.outputs.matched == {"**": len(NAMES)}


def test_inner_links_come_as_files_and_outer_ones_are_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "**")
    folder.writes("ckpt/epoch=9.ckpt", "weights")
    folder.writes("runs/7/a.txt", "x")
    (folder.work / "last.ckpt").symlink_to("ckpt/epoch=9.ckpt")
    (folder.work / "latest").symlink_to("runs/7")
    (tmp_path / "elsewhere").write_text("not the command's")
    (folder.work / "out.txt").symlink_to(tmp_path / "elsewhere")
    folder.looks(step=0, is_last=True)
    assert set(folder.kinds) == {f"outputs/{name}" for name in ("ckpt/epoch=9.ckpt", "runs/7/a.txt", "last.ckpt")}
    assert (folder.out / "outputs/last.ckpt").read_text() == "weights"
    assert folder.outputs.left_behind == [("out.txt", len("not the command's"))]


@pytest.mark.parametrize(
    ("globs", "coming", "left"),
    [
        (("**",), {"a.txt"}, {".cache": 10, "out": 10, "m.pt": 10}),
        (("*",), {"a.txt", "out/m.pt", "m.pt"}, {".cache": 10}),
        ((".cache/**",), {".cache/big"}, {}),
        (("out*/**", "*.pt"), {"out/m.pt", "m.pt"}, {}),
    ],
    ids=["everything", "a star", "named", "several"],
)
def test_caches_and_ignored_files_stay_unless_a_glob_takes_them(
    tmp_path: Path, globs: tuple[str, ...], coming: set[str], left: dict[str, int]
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".gpurunignore").write_text("# no uploads of these\nout/\n*.pt\n!keep.pt\n")
    folder = Folder(tmp_path, *globs)
    for name in ("a.txt", ".cache/big", "out/m.pt", "m.pt"):
        folder.writes(name, "x" * 10)
        os.utime(folder.work / name)
    folder.looks(step=0, is_last=True)
    assert set(folder.kinds) == {f"outputs/{name}" for name in coming}
    assert dict(folder.outputs.left_behind) == left
    warnings = [event["message"] for event in folder.events if event.get("code") == "outputs.left"]
    assert ["out (10 bytes)" in message for message in warnings] == [True] * ("out" in left)


def test_below_home_a_glob_brings_all_but_unnamed_dot_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "me").mkdir()
    folder = Folder(tmp_path, "~/**", "~/.cache/nanochat/**", str(tmp_path / "me/abs/*.pt"))
    for name in ("checkpoints/m.pt", ".ssh/id", ".cache/nanochat/base.pt", ".cache/pip/x", "abs/m.pt"):
        folder.writes(f"../me/{name}", "x")
        os.utime(tmp_path / "me" / name)
    (tmp_path / "me/stolen").symlink_to("/etc/passwd")
    folder.looks(step=0, is_last=True)
    assert set(folder.kinds) == {f"home/{name}" for name in ("checkpoints/m.pt", ".cache/nanochat/base.pt", "abs/m.pt")}
    assert folder.outputs.matched == {"~/**": 2, "~/.cache/nanochat/**": 1, str(tmp_path / "me/abs/*.pt"): 1}
    with pytest.raises(OSError, match="/srv/out"):
        Folder(tmp_path / "me", "/srv/out/**")


def test_a_file_written_to_the_end_comes_as_it_was_or_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process still writes after the command: an appended file is published, an overwritten one is reported."""
    folder = Folder(tmp_path, "**")
    folder.writes("log", "line 1")
    folder.writes("state", "aaaaaa")
    real = published.digest_while_copying

    def meanwhile(source: str, out: Any, most: int = 1 << 62) -> str:
        digest = real(source, out, most)
        name = Path(source).name
        if name in ("log", "state", ".publishing"):
            with (folder.work / "log").open("a") as log:
                log.write("more")
            (folder.work / "state").write_text(f"{time.monotonic_ns() % 10**6:06}")
        return digest

    monkeypatch.setattr(published, "digest_while_copying", meanwhile)
    folder.looks(step=0, is_last=True)
    assert [name for name, _, _ in folder.outputs.unpublished] == ["outputs/state"]
    assert (folder.out / "outputs/log").read_text().startswith("line 1")
    assert set(folder.kinds) == {"outputs/log"}


def test_too_many_files_warn_early_and_are_named_by_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "MOST_FILES", 10)
    folder = Folder(tmp_path, "**")
    for place in range(8):
        folder.writes(f"{place}", "x")
    folder.looks(step=0, times=2)
    assert [event["code"] for event in folder.events if event["kind"] == "warning"] == ["outputs.many"]
    for place in range(8, 13):
        folder.writes(f"{place}", "xx")
    folder.looks(step=0, is_last=True)
    assert len(folder.kinds) == 10
    (over,) = folder.outputs.unpublished
    assert over[:2][0].startswith("3 more files")


def test_files_and_folders_that_swap_come_as_they_are_last(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "**")
    folder.writes("a", "file")
    folder.writes("b/c", "in a folder")
    folder.looks(step=0, times=2)
    (folder.work / "a").unlink()
    shutil.rmtree(folder.work / "b")
    folder.writes("a/c", "in a folder")
    folder.writes("b", "file")
    folder.looks(step=0, is_last=True)
    assert set(folder.kinds) == {"outputs/a/c", "outputs/b"}
    assert (folder.out / "outputs/b").read_text() == "file"


def test_an_unreadable_checkpoint_takes_no_other_file_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, checkpoints="ckpt-*")
    for name in ("ckpt-1/a", "ckpt-1/b", "ckpt-2/a", "ckpt-2/b"):
        folder.writes(name, name)
    real = published.link_or_copy

    def broken(source: str, target: str, stamp: Any) -> Any:
        if source.endswith("ckpt-2/b"):
            raise OSError(5, "Input/output error")
        return real(source, target, stamp)

    monkeypatch.setattr(published, "link_or_copy", broken)
    folder.looks(step=0, is_last=True)
    assert folder.kinds == {
        "outputs/ckpt-1/a": "checkpoint",
        "outputs/ckpt-1/b": "checkpoint",
        "outputs/ckpt-2/a": "output",
    }
    assert folder.outputs.unpublished == [("outputs/ckpt-2/b", 8, "Input/output error")]


def test_what_the_command_removes_is_announced_no_more(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "*.txt", checkpoints="*.pt")
    folder.writes("a.txt", "x")
    folder.writes("1.pt", "x")
    folder.looks(step=1, times=2)
    for name in ("a.txt", "1.pt"):
        (folder.work / name).unlink()
    folder.looks(step=2, times=2)
    assert folder.kinds == {"outputs/1.pt": "checkpoint"}, "of checkpoints one is always there"


@pytest.mark.parametrize("is_full", [False, True])
def test_a_disk_without_room_for_a_copy_waits_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    folder = Folder(tmp_path, "*.bin")
    folder.writes("a.bin", "x")
    if is_full:
        usage = type("Usage", (), {"free": 10})
        monkeypatch.setattr("gpurun.remote.agent.runner.published.shutil.disk_usage", lambda _: usage)
    folder.looks(step=0, times=2)
    assert bool(folder.kinds) is not is_full
    folder.looks(step=0, is_last=True)
    assert folder.kinds == {"outputs/a.bin": "output"}


def test_an_unwritable_last_list_names_all_not_in_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, "**")
    folder.writes("early", "x")
    folder.writes("grows", "x")
    folder.looks(step=0, times=2)
    folder.writes("late", "xx")
    folder.writes("grows", "xyz")

    def broken(self: PublishedOutputs) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(PublishedOutputs, "write", broken)
    folder.looks(step=0, is_last=True)
    assert sorted(folder.outputs.unpublished) == [
        ("outputs/grows", 3, "Input/output error"), ("outputs/late", 2, "Input/output error"),
    ]  # fmt: skip
