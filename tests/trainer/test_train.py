"""Tests of the training loop: what it learns, how it stops, and that it resumes exactly."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import lacking
from tests.trainer.tiny_training import TEXT, Train, events, manifest, recipe_record, write_data
from trainer import train as train_module
from trainer.checkpoint import read_checkpoint
from trainer.distributed import prepare_allocator
from trainer.evaluate import Evaluation
from trainer.events import Reporter
from trainer.model import GPT
from trainer.run import TrainingRun
from trainer.start import open_run

MINI = {
    "model": {"width": 64, "context": 64},
    "optim": {"lr": 3e-4, "beta2": 0.999},
    "schedule": {"kind": "constant", "warmup_steps": 0, "min_lr": 0.0},
    "train": {"steps": 120, "batch_tokens": 1024, "micro_batch": 16, "log_every": 10, "checkpoint_every": 60},
    "eval": {"every": 60, "tokens": 1024},
}


@pytest.mark.slow
def test_the_loss_falls_on_the_mini_recipe(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(**MINI), tmp_path) == 0
    losses = [event["loss"] for event in events(tmp_path, "step")]
    assert losses[0] == pytest.approx(math.log(len({*TEXT})), abs=0.2)
    assert losses[-1] < 2.9
    first, last = (event["val_loss"] for event in events(tmp_path, "eval"))
    assert last < first
    assert manifest(tmp_path)["best"] == {"step": 120, "val_loss": last}


def test_events_and_lines_are_those_of_the_formats_page(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe_record(train={"steps": 4, "checkpoint_every": 4}), tmp_path) == 0
    found = events(tmp_path)
    assert [event["kind"] for event in found] == ["start", *["step"] * 4, "eval", "checkpoint", "sample", "stop"]
    keys = {
        event["kind"]: " ".join(key for key in event if key not in ("kind", "wall", "elapsed_s", "step"))
        for event in found
    }
    assert keys == {
        "start": "device cuda_name torch python world_size parameters tokens_per_step micro_batch accumulation "
        "precision steps resumed_from train_tokens val_tokens parallel compile_cache",
        "step": "loss lr grad_norm step_s tokens_per_s tokens mfu memory_peak_bytes skipped_steps",
        "eval": "val_loss perplexity bits_per_byte eval_tokens hellaswag hellaswag_items eval_s",
        "sample": "prompt text name",
        "checkpoint": "files bytes save_s stall_s",
        "stop": "reason message train_s final_loss",
    }
    start, stop = found[0], found[-1]
    assert (start["device"], start["cuda_name"], start["resumed_from"]) == ("cpu", None, None)
    assert (start["train_tokens"], start["val_tokens"]) == (16200, 1800)
    assert (stop["reason"], stop["step"], stop["final_loss"]) == ("done", 4, found[4]["loss"])
    sample = next(event for event in found if event["kind"] == "sample")
    assert (tmp_path / sample["name"]).read_text() == sample["text"]
    assert sample["text"].startswith("the ")
    assert len(sample["text"]) == 12
    log = (tmp_path / "trainer.log").read_text()
    assert log == capsys.readouterr().out
    lines = log.splitlines()
    assert lines[:2] == ["device: cpu", "parameters: 7,872"]
    assert lines[2].startswith("code: embedding trainer/model.py:")
    (portions,) = [line for line in lines if line.startswith("tokens per step: ")]
    assert re.findall(r"\d+", portions) == ["128", "2", "16", "1", "4"]
    pattern = r"step 0004 \| loss \d\.\d{4} \| lr \d\.\d\de-\d\d \| elapsed \d+\.\d s"
    assert len([line for line in lines if re.fullmatch(pattern, line)]) == 1
    assert lines[lines.index("--- sample ---") + 1] == sample["text"]
    assert "checkpoint: checkpoints/000004.model.safetensors" in lines


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, train: Train) -> None:
    recipe = recipe_record(train={"steps": 4, "checkpoint_every": 4})
    assert train(recipe, tmp_path) == 0
    before = (tmp_path / "MANIFEST.json").read_bytes()
    assert train(recipe, tmp_path) == 0
    assert (tmp_path / "MANIFEST.json").read_bytes() == before
    start, stop = events(tmp_path)[-2:]
    assert (start["resumed_from"], stop["reason"], stop["final_loss"]) == (
        4,
        "done",
        events(tmp_path, "step")[-1]["loss"],
    )


def test_a_finished_run_goes_on_where_its_recipe_has_more_steps(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(train={"steps": 2}), tmp_path) == 0
    assert train(recipe_record(train={"steps": 4}), tmp_path) == 0
    assert [event["resumed_from"] for event in events(tmp_path, "start")] == [None, 2]
    assert manifest(tmp_path)["latest"] == 4


def test_another_recipe_or_other_data_is_refused_by_name(tmp_path: Path, train: Train) -> None:
    train(recipe_record(train={"steps": 2}), tmp_path)
    assert train(recipe_record(train={"steps": 3}, optim={"lr": 1e-3}, model={"layers": 1}), tmp_path) == 2
    assert "model.layers, optim.lr" in events(tmp_path)[-1]["message"]
    state = tmp_path / "checkpoints" / "000002.state.json"
    record = json.loads(state.read_text())
    record["data"]["train"][0] = "0" * 64
    state.write_text(json.dumps(record))
    listed = manifest(tmp_path)
    entry = next(e for e in listed["files"] if e["kind"] == "state")
    entry["sha256"] = hashlib.sha256(state.read_bytes()).hexdigest()
    (tmp_path / "MANIFEST.json").write_text(json.dumps(listed))
    assert train(recipe_record(train={"steps": 2}), tmp_path) == 2
    assert "data.json: train" in events(tmp_path)[-1]["message"]


def test_nan_stops_before_the_weights_move(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[TrainingRun] = []
    monkeypatch.setattr(train_module, "open_run", lambda *a, **k: kept.append(open_run(*a, **k)) or kept[0])
    calls, forward = 0, GPT.forward

    def diverging(self: GPT, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += self.training
        loss = forward(self, ids, targets)
        return loss * math.nan if calls == 4 * 4 + 3 else loss  # the third micro-batch of the fifth step

    monkeypatch.setattr(GPT, "forward", diverging)
    assert train(recipe_record(train={"checkpoint_every": 4}), tmp_path) == 3
    stop = events(tmp_path)[-1]
    assert (stop["reason"], stop["step"]) == ("nonfinite", 4)
    assert lacking(stop["message"], "step 5 ", "nan") == []
    weights = read_checkpoint(tmp_path, manifest(tmp_path)["latest"]).model
    assert all(torch.equal(weights[name], tensor) for name, tensor in kept[0].setup.model.state_dict().items())
    assert manifest(tmp_path)["latest"] == 4


def test_an_infinite_gradient_of_a_finite_loss_stops_too(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    assert train(recipe_record(), tmp_path) == 3
    assert "gradient norm inf" in events(tmp_path)[-1]["message"]
    assert not (tmp_path / "MANIFEST.json").exists()


def test_a_validation_loss_that_is_no_number_saves_nothing(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "validation", lambda *_, **__: Evaluation(math.nan, None))
    assert train(recipe_record(), tmp_path) == 3
    assert lacking(events(tmp_path)[-1]["message"], "step 10 ", "validation", "nan") == []
    assert not (tmp_path / "MANIFEST.json").exists()


@pytest.mark.slow
def test_a_micro_batch_is_at_most_what_the_card_is_said_to_hold(tmp_path: Path, data: Path, train: Train) -> None:
    recipe = recipe_record(model={"dropout": 0.0}, train={"steps": 6, "micro_batch": 8, "checkpoint_every": 3})
    assert train(recipe, tmp_path / "whole") == 0
    for room, taken in (("2", 2), ("3", 2), ("64", 8)):
        out = tmp_path / room
        assert train(recipe, out, data, "--micro-batch", room) == 0
        assert [event["micro_batch"] for event in events(out, "start")] == [taken]
        losses = [event["loss"] for event in events(out, "step")]
        assert losses == pytest.approx([event["loss"] for event in events(tmp_path / "whole", "step")], rel=1e-5)
    shutil.copytree(tmp_path / "2", tmp_path / "on another card")
    assert train(recipe, tmp_path / "on another card", data, "--micro-batch", "4") == 0, "one run, however it is cut"
    assert train(recipe, tmp_path / "none", data, "--micro-batch", "0") == 2


def test_out_of_memory_is_exit_4_and_says_what_to_do(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GPT, "forward", full)
    assert train(recipe_record(), tmp_path) == 4
    stop = events(tmp_path)[-1]
    assert stop["reason"] == "out_of_memory"
    assert "context 16 " in stop["message"]


def test_a_full_disk_leaves_the_last_checkpoint_intact(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, replaced = os.replace, 0

    def full(source: Any, target: Any) -> None:
        nonlocal replaced
        replaced += str(source).endswith(".safetensors.tmp")
        if replaced == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert train(recipe_record(), tmp_path) == 1
    assert lacking(events(tmp_path)[-1]["message"], "disk is full", "step 10 ") == []
    monkeypatch.undo()
    names = {path.name[:6] for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"000010"}


def test_a_bug_is_reported_before_the_process_ends(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_module, "report_step", lambda *_: 1 // 0)
    assert train(recipe_record(), tmp_path) == 1
    assert events(tmp_path)[-1]["message"].startswith("ZeroDivisionError")
    assert "Traceback" in capsys.readouterr().err


def test_a_wrong_recipe_is_exit_2_with_a_stop_event(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(train={"batch_tokens": 100}), tmp_path) == 2
    assert lacking(events(tmp_path)[-1]["message"], "train.batch_tokens 100", "model.context 16") == []
    for form in ("refuse", "rehearsal"):
        assert train(recipe_record(hardware={"on_cpu": form}), tmp_path) == 2
        assert events(tmp_path)[-1]["message"].startswith(f'hardware.on_cpu is "{form}"')
    assert train(recipe_record(model={"vocab_size": 20}), tmp_path) == 2
    assert lacking(events(tmp_path)[-1]["message"], "20 ", "28") == []


def test_bf16_on_the_cpu_trains_and_keeps_fp32_weights(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(train={"precision": "bf16"}), tmp_path) == 0
    losses = [event["loss"] for event in events(tmp_path, "step")]
    assert losses[-1] < losses[0] - 0.5
    assert {t.dtype for t in read_checkpoint(tmp_path, 20).model.values()} == {torch.float32}


def test_a_stop_that_comes_during_evaluation_saves_at_once(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[TrainingRun] = []
    monkeypatch.setattr(train_module, "open_run", lambda *a, **k: kept.append(open_run(*a, **k)) or kept[0])
    forward = GPT.forward

    def asking(self: GPT, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.training:
            kept[0].io.stop_requested.set()
        return forward(self, ids, targets)

    monkeypatch.setattr(GPT, "forward", asking)
    assert train(recipe_record(eval={"every": 7}), tmp_path) == 0
    assert [event["kind"] for event in events(tmp_path)][-3:] == ["step", "checkpoint", "stop"]
    assert (events(tmp_path)[-1]["reason"], manifest(tmp_path)["latest"]) == ("signal", 7)


@pytest.mark.slow
@pytest.mark.parametrize("cut_at", [10, 20])
def test_an_evaluation_that_a_stop_cut_short_is_made_on_resume(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, cut_at: int
) -> None:
    assert train(recipe_record(), tmp_path / "straight") == 0
    kept: list[TrainingRun] = []
    forward = GPT.forward
    monkeypatch.setattr(train_module, "open_run", lambda *a, **k: kept.append(open_run(*a, **k)) or kept[-1])

    def asking(self: GPT, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self.training and len(kept) == 1 and kept[0].state.step == cut_at:
            kept[0].io.stop_requested.set()
        return forward(self, ids, targets)

    monkeypatch.setattr(GPT, "forward", asking)
    for reason in ("signal", "done"):
        assert train(recipe_record(), tmp_path / "cut") == 0
        assert events(tmp_path / "cut")[-1]["reason"] == reason
    evaluated = [[(e["step"], e["val_loss"]) for e in events(tmp_path / name, "eval")] for name in ("straight", "cut")]
    assert evaluated[0] == evaluated[1]
    assert manifest(tmp_path / "cut")["best"] == manifest(tmp_path / "straight")["best"]


def test_a_stop_that_comes_before_the_first_step_waits_for_none(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*given: Any, **more: Any) -> TrainingRun:
        more["stop_requested"].set()
        return open_run(*given, **more)

    monkeypatch.setattr(train_module, "open_run", stopping)
    assert train(recipe_record(), tmp_path) == 0
    assert [event["kind"] for event in events(tmp_path)] == ["start", "stop"]
    assert (events(tmp_path)[-1]["reason"], (tmp_path / "MANIFEST.json").exists()) == ("signal", False)


def test_less_eval_text_than_asked_for_is_said(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(train={"steps": 2}, eval={"tokens": 99999}), tmp_path) == 0
    (warning,) = events(tmp_path, "warning")
    assert warning["code"] == "eval.fewer_tokens"
    assert events(tmp_path, "eval")[0]["eval_tokens"] == 1792


def test_sharding_that_one_process_cannot_do_is_said(tmp_path: Path, train: Train) -> None:
    assert train(recipe_record(train={"steps": 2, "parallel": "fsdp"}), tmp_path) == 0
    (warning,) = events(tmp_path, "warning")
    assert (warning["code"], events(tmp_path, "start")[0]["parallel"]) == ("parallel.alone", None)


def test_a_run_takes_given_weights_only_at_its_beginning(tmp_path: Path, train: Train) -> None:
    folder = write_data(tmp_path / "data")
    assert train(recipe_record(train={"steps": 8}), tmp_path / "first", folder) == 0
    shutil.copy(tmp_path / "first" / "checkpoints" / "000008.model.safetensors", folder / "start.safetensors")
    recipe = recipe_record(train={"steps": 4, "checkpoint_every": 2, "init_from": "start.safetensors"})
    assert train(recipe, tmp_path / "out", folder) == 0
    losses = {name: [e["loss"] for e in events(tmp_path / name, "step")] for name in ("first", "out")}
    assert losses["out"][0] < losses["first"][-1] + 0.1 < losses["first"][0] - 0.1
    (folder / "start.safetensors").unlink()
    assert train(recipe, tmp_path / "out", folder) == 0, "a run that goes on does not look at it"
    assert train(recipe, tmp_path / "another", folder) == 2
    assert "start.safetensors" in events(tmp_path / "another")[-1]["message"]


def test_the_garbage_collector_rests_while_steps_are_taken(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, report = [], Reporter.step

    def step(self: Reporter, number: int, values: dict[str, Any]) -> None:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        report(self, number, values)

    monkeypatch.setattr(Reporter, "step", step)
    assert train(recipe_record(train={"steps": 3}), tmp_path) == 0
    assert seen == [(False, True)] * 3
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


@pytest.mark.parametrize("given", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_grows_segments_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(os, "environ", {given: "max_split_size_mb:64"} if given else {})
    prepare_allocator()
    chosen = {name: os.environ[name] for name in names if name in os.environ}
    assert list(chosen.values()) == ["max_split_size_mb:64" if given else "expandable_segments:True"]
