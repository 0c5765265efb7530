"""What a command leaves comes home whole, once it is finished, and nothing comes that was uploaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpurun.remote.agent.runner.published import Outputs
from gpurun.remote.messages import understood_manifest


class Folder:
    """A command's folder, and what is published of it."""

    def __init__(self, root: Path, *outputs: str, checkpoints: str = "") -> None:
        self.work, self.out = root / "work", root / "out"
        self.work.mkdir(exist_ok=True)
        self.told: list[dict[str, Any]] = []
        order = {"outputs": outputs, "checkpoints": checkpoints}
        self.outputs = Outputs(
            str(self.work), str(self.out), order, lambda kind, **more: self.told.append({"kind": kind, **more})
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
        """What home is told that there is; every digest is that of the copy."""
        path = self.out / "MANIFEST.json"
        if not path.exists():
            return {}
        return {one.name: one.kind for one in understood_manifest(path.read_bytes(), 1 << 40).files}

    @property
    def latest(self) -> int | None:
        return json.loads((self.out / "MANIFEST.json").read_text())["latest"]


def test_a_checkpoint_that_is_written_in_place_is_published_once_it_stands_still(tmp_path: Path) -> None:
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


def test_of_checkpoints_in_folders_the_newest_whole_one_is_the_latest_and_the_others_are_outputs(
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
    assert [one["step"] for one in folder.told if one["kind"] == "checkpoint"] == [100, 200]


def test_what_was_uploaded_is_no_output_until_the_command_changes_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    for name in ("train.py", "log.txt"):
        (tmp_path / "work" / name).write_text("before")
    folder = Folder(tmp_path, "**")
    folder.looks(step=0, times=2)
    assert folder.kinds == {}
    folder.writes("log.txt", "more")
    folder.looks(step=0, is_last=True)
    assert folder.kinds == {"outputs/log.txt": "output"}


def test_caches_links_and_odd_names_stay_there_and_the_last_are_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "**")
    folder.writes("__pycache__/a.cpython-311.pyc", "x")
    folder.writes("ok/run-1=a,b@c.txt", "x")
    folder.writes("best model.pt", "x")
    (folder.work / "passwd").symlink_to("/etc/passwd")
    folder.looks(step=0, is_last=True)
    assert folder.kinds == {"outputs/ok/run-1=a,b@c.txt": "output"}
    (warning,) = [one for one in folder.told if one["kind"] == "warning"]
    assert warning["code"] == "outputs.name"
    assert "best model.pt" in warning["message"]


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
def test_a_disk_without_room_for_a_copy_waits_for_the_end_where_none_is_needed(
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
