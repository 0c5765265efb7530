"""Tests that the Hugging Face Trainer, in place of our loop, gives the same curve, files and ends of a run."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.refusals import lacking
from tests.trainer.tiny_training import ROOT, Train, events, manifest, recipe_record
from trainer.checkpoint import read_checkpoint
from trainer.distributed import Device
from trainer.events import Reporter
from trainer.generate import open_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
        reason="pip install '.[hf]' to compare with the Hugging Face Trainer",
    ),
]


def recipe(loop: str, **tables: dict[str, Any]) -> dict[str, Any]:
    return recipe_record(**tables | {"train": {"loop": loop, "spike": "off"} | tables.get("train", {})})


def curve(out: Path) -> dict[int, tuple[float, float, float]]:
    return {event["step"]: (event["loss"], event["grad_norm"], event["lr"]) for event in events(out, "step")}


def test_both_loops_draw_one_curve_and_write_the_same_files(tmp_path: Path, train: Train, data: Path) -> None:
    for loop in ("own", "huggingface"):
        assert train(recipe(loop, train={"steps": 30}), tmp_path / loop) == 0
    ours, theirs = curve(tmp_path / "own"), curve(tmp_path / "huggingface")
    assert len(ours) == 30
    for step, figures in ours.items():  # Dropout's masks are the same too, because they depend only on the position.
        assert theirs[step] == pytest.approx(figures, rel=1e-4)
    for kind in ("start", "step", "eval", "sample", "checkpoint", "stop"):
        first, second = (events(tmp_path / loop, kind) for loop in ("own", "huggingface"))
        assert [e.keys() for e in first] == [e.keys() for e in second]
    before, after = (read_checkpoint(tmp_path / loop, 30) for loop in ("own", "huggingface"))
    for saved, twin in ((before.model, after.model), (before.optimizer, after.optimizer)):
        assert {name: t.shape for name, t in twin.items()} == {name: t.shape for name, t in saved.items()}
    for name, tensor in before.model.items():
        if tensor.dim() == 2:  # not biases: a key's bias has only rounding errors as its gradient, which AdamW enlarges
            torch.testing.assert_close(after.model[name], tensor, rtol=1e-2, atol=1e-4, msg=name)
    assert [f["name"] for f in manifest(tmp_path / "own")["files"]] == [
        f["name"] for f in manifest(tmp_path / "huggingface")["files"]
    ]
    assert open_checkpoint(tmp_path / "huggingface", data).step == 30


def test_a_stopped_run_goes_on_with_the_very_same_losses(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(recipe("huggingface"), tmp_path / "straight") == 0
    stop = threading.Event()
    report = Reporter.step

    def stopping(self: Reporter, step: int, values: dict[str, Any]) -> None:
        report(self, step, values)
        if step == 13:
            stop.set()

    with monkeypatch.context() as once:
        once.setattr("trainer.train.watch_for_stop", lambda: stop)
        once.setattr(Reporter, "step", stopping)
        assert train(recipe("huggingface"), tmp_path / "out") == 0
    assert (events(tmp_path / "out")[-1]["reason"], manifest(tmp_path / "out")["latest"]) == ("signal", 14)
    assert train(recipe("huggingface"), tmp_path / "out") == 0
    assert events(tmp_path / "out", "start")[1]["resumed_from"] == 14
    assert curve(tmp_path / "out") == curve(tmp_path / "straight")
    ends = [(tmp_path / name / "checkpoints/000020.model.safetensors").read_bytes() for name in ("straight", "out")]
    assert ends[0] == ends[1]
    assert train(recipe("own"), tmp_path / "out") == 2, "a run of one loop is not the other's"
    assert "train.loop" in events(tmp_path / "out")[-1]["message"]


def test_of_two_cards_one_trains_with_the_recipes_batch(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    assert train(recipe("huggingface", train={"steps": 4}), tmp_path / "one") == 0
    setup = TrainingArguments._setup_devices.func

    def two_cards(self: TrainingArguments) -> torch.device:
        device: torch.device = setup(self)
        self._n_gpu = 2
        return device

    monkeypatch.setattr(TrainingArguments, "_setup_devices", functools.cached_property(two_cards))
    TrainingArguments._setup_devices.__set_name__(TrainingArguments, "_setup_devices")
    assert train(recipe("huggingface", train={"steps": 4}), tmp_path / "two") == 0
    assert curve(tmp_path / "two") == curve(tmp_path / "one")


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_no_number_stops_it_before_the_weights_move(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from transformers import GPT2LMHeadModel

    forward, calls = GPT2LMHeadModel.forward, 0

    def broken(self: nn.Module, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = forward(self, *given, **named)
        if calls == 4 * 12 + 2:  # in the thirteenth step's second portion
            spoil: Tensor = result.loss
            if what == "loss":
                result.loss = spoil * float("nan")
            else:
                spoil.register_hook(lambda gradient: gradient * float("inf"))
        return result

    broken.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # their Trainer reads it
    monkeypatch.setattr(GPT2LMHeadModel, "forward", broken)
    assert train(recipe("huggingface"), tmp_path) == 3
    stop = events(tmp_path)[-1]
    assert (stop["reason"], stop["step"], manifest(tmp_path)["latest"]) == ("nonfinite", 12, 10)
    assert "step 13 " in stop["message"]


@pytest.mark.parametrize(
    ("full_at", "dropout", "like"),
    [
        pytest.param(1, 0.1, 1, id="at once: as if the smaller one had been asked for, with the masks of its portions"),
        pytest.param(4 * 2 + 2, 0.0, 2, id="in the third step's second portion"),
    ],
)
def test_memory_that_runs_out_costs_neither_a_step_nor_a_token(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, full_at: int, dropout: float, like: int
) -> None:
    from transformers import GPT2LMHeadModel

    def recipe_of(micro_batch: int) -> dict[str, Any]:
        return recipe("huggingface", train={"steps": 6, "micro_batch": micro_batch}, model={"dropout": dropout})

    assert train(recipe_of(like), tmp_path / "straight") == 0
    forward, calls = GPT2LMHeadModel.forward, 0

    def full(self: nn.Module, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += self.training
        result = forward(self, *given, **named)
        if self.training and calls >= full_at and len(named["input_ids"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    full.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # their Trainer reads it
    monkeypatch.setattr(GPT2LMHeadModel, "forward", full)
    assert train(recipe_of(2), tmp_path / "out") == 0
    (warning,) = events(tmp_path / "out", "warning")
    step = (full_at - 1) // 4
    assert (warning["code"], warning["step"]) == ("memory.micro_batch", step)
    assert lacking(warning["message"], f"step {step + 1}", "micro_batch 2 became 1", "8 portions") == []
    for number, figures in curve(tmp_path / "straight").items():
        assert curve(tmp_path / "out")[number] == pytest.approx(figures, rel=1e-5)
    assert manifest(tmp_path / "out")["latest"] == 6


def test_a_sequence_that_does_not_fit_ends_as_out_of_memory(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2LMHeadModel

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    full.__signature__ = inspect.signature(GPT2LMHeadModel.forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(GPT2LMHeadModel, "forward", full)
    assert train(recipe("huggingface"), tmp_path) == 4
    assert "one sequence" in events(tmp_path)[-1]["message"]


def test_without_the_library_or_with_fp16_it_is_refused(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert train(recipe("huggingface"), tmp_path / "a") == 2
    assert lacking(events(tmp_path / "a")[-1]["message"], "transformers", "accelerate") == []
    fp16 = Device(torch.device("cpu"), "fp16", "Tesla T4")  # what "auto" becomes on such a GPU
    monkeypatch.setattr("trainer.train.choose_device", lambda *_: fp16)
    assert train(recipe("huggingface"), tmp_path / "b") == 2
    assert lacking(events(tmp_path / "b")[-1]["message"], "fp16", "Tesla T4") == []


@pytest.mark.parametrize("version", ["4.57.1", "5.5.0", "5.5.9.dev0"])
def test_a_library_that_divides_the_gradient_twice_is_refused(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Up to 5.5 the library divided accumulated gradients twice by the number of portions, while its loss was right."""
    monkeypatch.setattr("transformers.__version__", version)
    assert train(recipe("huggingface"), tmp_path) == 2
    assert lacking(events(tmp_path)[-1]["message"], "transformers 5.6", version) == []


def test_their_trainer_is_loaded_only_where_it_trains() -> None:
    script = "import sys, trainer.train; print(sorted({'transformers', 'accelerate'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "[]\n"
