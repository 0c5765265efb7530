"""Tests that training continues while checkpoints are written, that files are whole, and that failures are reported."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import lacking
from tests.trainer.tiny_training import Train, events, manifest, patience_s, recipe_record
from trainer import evaluate
from trainer.checkpoint import CheckpointStore, read_checkpoint
from trainer.errors import SaveFailed, Spiked
from trainer.events import UNKNOWN_S, Reporter
from trainer.saving import CheckpointWriter, Snapshot


class Gate:
    """A patch that holds `CheckpointStore.save` until `open` is set; `most` is the most saves at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.inside, self.most = 0, 0
        real = CheckpointStore.save

        def save(store: CheckpointStore, *arguments: Any) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.begun.set()
            assert self.open.wait(30)
            self.inside -= 1
            return real(store, *arguments)

        monkeypatch.setattr(CheckpointStore, "save", save)


def writer(out: Path) -> CheckpointWriter:
    return CheckpointWriter(CheckpointStore(out), Reporter(out, is_first=True))


def snapshot(step: int, weight: torch.Tensor) -> Snapshot:
    return Snapshot(step, [("w", weight)], [("w.exp_avg", weight / 2)], {"v": 1, "step": step})


def test_what_changes_after_the_copy_does_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, saving, weight = Gate(monkeypatch), writer(tmp_path), torch.full((4,), 1.0)
    saving.save(snapshot(1, weight), None)
    assert gate.begun.wait(30)
    weight.fill_(2.0)
    assert events(tmp_path) == [], "the event must not come before the file"
    gate.open.set()
    saving.store()
    assert torch.equal(read_checkpoint(tmp_path, 1).model["w"], torch.full((4,), 1.0))
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [1]


def test_never_two_saves_at_once_and_the_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, saving, weight = Gate(monkeypatch), writer(tmp_path), torch.ones(4)
    saving.save(snapshot(1, weight), None)
    threading.Timer(0.3, gate.open.set).start()
    saving.save(snapshot(2, weight * 2), None)
    saving.store()
    first, second = events(tmp_path, "checkpoint")
    assert gate.most == 1
    assert first["stall_s"] < 0.2 < second["stall_s"]
    assert first["save_s"] > 0.2, "what the disk took, though training went on"
    assert torch.equal(read_checkpoint(tmp_path, 1).model["w"], torch.ones(4))
    assert torch.equal(read_checkpoint(tmp_path, 2).model["w"], torch.full((4,), 2.0))


def test_the_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, report = Gate(monkeypatch), Reporter.step

    def step(self: Reporter, number: int, values: dict[str, Any]) -> None:
        report(self, number, values)
        if number == 15:
            gate.open.set()

    monkeypatch.setattr(Reporter, "step", step)
    assert train(recipe_record(), tmp_path) == 0
    seen = [(event["kind"], event["step"]) for event in events(tmp_path)]
    assert seen.index(("checkpoint", 10)) > seen.index(("step", 15))
    assert seen[-3:] == [("checkpoint", 20), ("sample", 20), ("stop", 20)], "the end waits for the last one"


def test_samples_that_fail_cost_no_checkpoint(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = evaluate.generate, 0

    def broken(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        assert calls < 2, "a bug in the second sample"
        return real(*given, **named)

    monkeypatch.setattr(evaluate, "generate", broken)
    assert train(recipe_record(), tmp_path) == 1
    assert "a bug in the second sample" in events(tmp_path)[-1]["message"]
    listed = manifest(tmp_path)
    assert listed["latest"] == 20
    assert [file["name"] for file in listed["files"] if file["kind"] == "sample"] == ["samples/000010-0.txt"]


def test_the_last_samples_are_announced_too(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(), tmp_path) == 0
    names = [file["name"] for file in manifest(tmp_path)["files"] if file["kind"] == "sample"]
    assert names == ["samples/000010-0.txt", "samples/000020-0.txt"]
    assert names == [event["name"] for event in events(tmp_path, "sample")]


def test_a_failure_of_the_thread_ends_the_run_with_its_sentence(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(handle: int) -> None:
        if threading.current_thread().name == "checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    assert train(recipe_record(), tmp_path) == 1
    stop = events(tmp_path)[-1]
    assert lacking(stop["message"], "step 10 ", "disk is full", "no checkpoint") == []
    assert 10 <= stop["step"] <= 20


def test_a_failure_is_reported_and_the_save_under_way_is_kept(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CheckpointStore.save

    def slow(store: CheckpointStore, *arguments: Any) -> Any:
        time.sleep(0.5)
        return real(store, *arguments)

    monkeypatch.setattr(CheckpointStore, "save", slow)
    report = Reporter.step

    def dying(self: Reporter, number: int, values: dict[str, Any]) -> None:
        report(self, number, values)
        assert number < 11, "a bug in step 11"

    monkeypatch.setattr(Reporter, "step", dying)
    assert train(recipe_record(), tmp_path) == 1
    assert "a bug in step 11" in events(tmp_path)[-1]["message"]
    assert manifest(tmp_path)["latest"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(("error", "saved"), [(Spiked("a jump"), [10, 11]), (RuntimeError("a bug"), [10])])
def test_a_watcher_waits_for_the_disk_however_training_ends(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, error: Exception, saved: list[int]
) -> None:
    patience: dict[int, float] = {}
    real, report = CheckpointStore.save, Reporter.step

    def slow(store: CheckpointStore, live: Any, *arguments: Any) -> Any:
        time.sleep(0.5)
        patience[live.step] = patience_s(tmp_path)
        return real(store, live, *arguments)

    def dying(self: Reporter, number: int, values: dict[str, Any]) -> None:
        report(self, number, values)
        if number == 11:
            raise error

    monkeypatch.setattr(CheckpointStore, "save", slow)
    monkeypatch.setattr(Reporter, "step", dying)
    assert train(recipe_record(), tmp_path) != 0
    assert patience == dict.fromkeys(saved, UNKNOWN_S)


def test_a_failure_is_raised_once_and_the_next_save_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = writer(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        saving.save(snapshot(1, torch.ones(4)), None)
        with pytest.raises(SaveFailed, match="Input/output error"):
            saving.store()
    saving.save(snapshot(2, torch.ones(4)), None)
    assert saving.store().latest == 2
