"""Tests that neither a crash at any moment nor a full disk destroys an existing checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny_training import manifest
from trainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from trainer.errors import Refused, SaveFailed


def checkpoint(step: int) -> Checkpoint:
    tensors = {"w": torch.full((5, 3), float(step))}
    return Checkpoint(step, tensors, {"w.exp_avg": tensors["w"] / 2}, {"v": 1, "step": step})


def store_with(out: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(out)
    for step in steps:
        store.save(checkpoint(step), None)
    return store


def files(out: Path) -> set[str]:
    return {path.name for path in (out / "checkpoints").iterdir()}


def resume(out: Path) -> int | None:
    """Find the newest sound checkpoint as a new process does, assert that it is whole, and return its step or None."""
    step, _ = CheckpointStore(out).newest_sound()
    if step is not None:
        found = read_checkpoint(out, step)
        assert torch.equal(found.model["w"], torch.full((5, 3), float(step)))
        assert found.state["step"] == step
    return step


def in_child(act: Callable[[], Any]) -> int:
    """Run `act` in a forked child that may exit at any line; return its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("owner", "call"), [(os, "open"), (os, "fsync"), (os, "replace"), (Path, "unlink")])
@pytest.mark.parametrize("before", [True, False])
def test_dying_at_any_disk_call_leaves_a_whole_checkpoint(tmp_path: Path, owner: Any, call: str, before: bool) -> None:
    died = 0
    for number in range(1, 40):
        out = tmp_path / str(number)
        store_with(out, 10, 20)

        def save(out: Path = out, number: int = number) -> None:
            real, count = getattr(owner, call), 0

            def dying(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                count += 1
                if before and count == number:
                    os._exit(9)
                result = real(*arguments, **keywords)
                if count == number:
                    os._exit(9)
                return result

            setattr(owner, call, dying)
            store_with(out, 30)

        status = in_child(save)
        named = {entry["name"].removeprefix("checkpoints/") for entry in manifest(out)["files"]}
        assert resume(out) == manifest(out)["latest"]
        assert manifest(out)["latest"] in ((20, 30) if status == 9 else (30,))
        assert files(out) == named, "leftovers were not cleared"
        assert resume(out) in (20, 30)
        if status != 9:
            assert status == 0
            break
        died += 1
    assert died >= 3


@pytest.mark.parametrize("replaced", ["compile-cache/0.bin", "samples/000010-0.txt"])
def test_no_moment_has_a_manifest_that_names_another_file(tmp_path: Path, replaced: str) -> None:
    """A file with another digest than the manifest's would not be downloaded; the run would count as not collected."""

    def write(content: str) -> None:
        if replaced.startswith("samples"):
            store.write_samples(10, [content])
        else:
            store.write_compile_cache(10, replaced, content.encode())
            store.save(checkpoint(10), None)

    def replacing(file: int, other: str, rename: Callable[..., None] = os.replace) -> None:
        rename(file, other)
        for entry in manifest(tmp_path)["files"]:
            assert hashlib.sha256((tmp_path / entry["name"]).read_bytes()).hexdigest() == entry["sha256"]

    store = store_with(tmp_path, 5)
    write("as it was at first")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", replacing)
        write("as it is made again")
    assert replaced in {entry["name"] for entry in manifest(tmp_path)["files"]}
    assert resume(tmp_path) == store.latest


def test_a_full_disk_is_said_and_leaves_the_old_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, 10, 20)
    before = (tmp_path / "MANIFEST.json").read_bytes()
    for failing in range(1, 9):  # file and folder of three files and of the manifest
        count = 0

        def full(handle: int, failing: int = failing) -> None:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SaveFailed, match=r"step 30 .* disk is full.* step 20 "):
            store.save(checkpoint(30), 0.1)
        assert not any(name.endswith(".tmp") for name in files(tmp_path))
        if failing < 8:
            assert (tmp_path / "MANIFEST.json").read_bytes() == before
            assert resume(tmp_path) == 20
    store.save(checkpoint(30), 0.1)
    assert resume(tmp_path) == 30


def test_the_latest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step, val_loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.5), (5, None)):
        store.save(checkpoint(step), val_loss)
        (name,) = store.write_samples(step, [f"text {step}"])
        assert (tmp_path / name).read_text() == f"text {step}"
    record = manifest(tmp_path)
    assert (record["v"], record["latest"], record["best"]) == (1, 5, {"step": 2, "val_loss": 1.0})
    assert {e["step"] for e in record["files"] if e["kind"] == "weights"} == {2, 4, 5}
    assert {e["step"] for e in record["files"] if e["kind"] == "sample"} == {1, 2, 3, 4, 5}
    assert len(files(tmp_path)) == 9
    again = CheckpointStore(tmp_path)
    assert (again.latest, again.best) == (5, {"step": 2, "val_loss": 1.0})


@pytest.mark.parametrize("suffix", ["model.safetensors", "optim.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, suffix: str, damage: str) -> None:
    store = store_with(tmp_path, 10)
    store.save(checkpoint(20), 0.5)
    path = tmp_path / "checkpoints" / f"000020.{suffix}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content if damage == "flip" else content[:-1])
    assert CheckpointStore(tmp_path).newest_sound() == (10, [20])
    record = manifest(tmp_path)
    assert (record["latest"], record["best"]) == (10, None)
    assert not any(name.startswith("000020") for name in files(tmp_path))
    assert CheckpointStore(tmp_path).newest_sound() == (10, [])


def test_with_nothing_sound_left_nothing_is_deleted(tmp_path: Path) -> None:
    store_with(tmp_path, 10)
    (tmp_path / "checkpoints" / "000010.optim.safetensors").write_bytes(b"")
    kept = files(tmp_path)
    with pytest.raises(Refused, match=r"\(steps \[10\]\)"):
        CheckpointStore(tmp_path).newest_sound()
    assert files(tmp_path) == kept


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"v": 2, "latest": 1, "best": null, "files": []}'),
        *('{"v":1,"latest":1,"best":null,"files":[1]}', '{"v":1,"latest":1,"best":"x","files":[]}'),
        *('{"v":1,"latest":1,"best":{},"files":[]}', '{"v":1,"latest":1,"best":{"step":1,"val_loss":"x"},"files":[]}'),
        pytest.param("[" * 200_000, id="nested without end"),
    ],
)
def test_an_unreadable_manifest_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    store_with(tmp_path, 10)
    (tmp_path / "MANIFEST.json").write_text(text)
    with pytest.raises(Refused, match=r"MANIFEST\.json"):
        CheckpointStore(tmp_path)
    assert len(files(tmp_path)) == 3


def test_checkpoints_without_their_manifest_are_kept(tmp_path: Path) -> None:
    store_with(tmp_path, 10, 20)
    (tmp_path / "MANIFEST.json").unlink()
    with pytest.raises(Refused, match=r"MANIFEST\.json"):
        CheckpointStore(tmp_path)
    assert len(files(tmp_path)) == 6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../../x"), ("name", "../x"), ("name", None), ("step", "10"), ("step", [10]), ("step", 10.0),
        ("step", True), ("kind", ["weights"]), ("sha256", None), ("bytes", "1"),
    ],
)  # fmt: skip
def test_an_entry_that_leads_out_of_the_folder_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    store_with(tmp_path, 10)
    record = manifest(tmp_path)
    record["files"][0][key] = value
    (tmp_path / "MANIFEST.json").write_text(json.dumps(record))
    with pytest.raises(Refused, match=r"MANIFEST\.json"):
        CheckpointStore(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("[1]", "{}", '{"step": "10"}', '{"step": 11}', '{"step": true}'),
        pytest.param("[" * 200_000, id="nested without end"),
    ],
)
def test_a_state_that_is_not_of_its_step_is_refused(tmp_path: Path, text: str) -> None:
    store_with(tmp_path, 10)
    (tmp_path / "checkpoints" / "000010.state.json").write_text(text)
    with pytest.raises(Refused, match="step 10 "):
        read_checkpoint(tmp_path, 10)


def test_an_empty_folder_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).newest_sound() == (None, [])
