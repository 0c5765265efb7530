"""Tests of one step: it is repeated if memory runs out, and checked before the weights change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import lacking
from tests.trainer.tiny_training import Train, events, losses, manifest, patience_s, recipe_record
from trainer import optim
from trainer.checkpoint import read_checkpoint
from trainer.data import BatchPlan, smaller
from trainer.distributed import precision_of_card
from trainer.errors import Refused
from trainer.events import UNKNOWN_S, Reporter
from trainer.model import GPT
from trainer.optim import LossScale, SpikeGuard
from trainer.run import TrainingRun
from trainer.start import open_run
from trainer.train import save

NO_DROPOUT = {"dropout": 0.0}
Tamper = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tamper(monkeypatch: pytest.MonkeyPatch, change: Tamper) -> None:
    """Replace the loss of every training forward by `change(ids, loss)`, which may raise."""
    forward = GPT.forward

    def changed(self: GPT, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = forward(self, ids, targets)
        return change(ids, loss) if self.training else loss

    monkeypatch.setattr(GPT, "forward", changed)


def weights(out: Path, step: int) -> bytes:
    return (out / f"checkpoints/{step:06d}.model.safetensors").read_bytes()


def test_a_smaller_micro_batch_divides_and_keeps_the_batch() -> None:
    plan = BatchPlan(96, 12, 4)  # two processes of 48 sequences
    assert smaller(plan) == BatchPlan(96, 8, 6)
    assert smaller(BatchPlan(7, 7, 1)) == BatchPlan(7, 1, 7)
    assert smaller(BatchPlan(8, 1, 8)) is None


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 4 * 4 + 3])  # in the first forward; in the third micro-batch of the fifth step
def test_memory_that_runs_out_costs_neither_a_step_nor_a_token(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    recipe = recipe_record(model=NO_DROPOUT, train={"micro_batch": 2})
    assert train(recipe, tmp_path / "straight") == 0
    calls, seen = 0, []

    def full(ids: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls >= call and len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(ids)
        return loss

    tamper(monkeypatch, full)
    assert train(recipe, tmp_path / "out") == 0
    (warning,) = events(tmp_path / "out", "warning")
    step = (call - 1) // 4
    assert (warning["code"], warning["step"]) == ("memory.micro_batch", step)
    assert lacking(warning["message"], f"step {step + 1}", "micro_batch 2 became 1", "8 portions") == []
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)
    assert sum(len(ids) for ids in seen) == 20 * 8 + 2 * ((call - 1) % 4)


@pytest.mark.slow
@pytest.mark.parametrize(("planned", "then"), [(4, 2), (8, 8)])
def test_a_resumed_run_begins_with_the_micro_batch_that_fitted(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, planned: int, then: int
) -> None:
    def full(ids: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    tamper(monkeypatch, full)
    with monkeypatch.context() as once:
        once.setattr("trainer.train.save", lambda *parts: save(*parts) or parts[2].stop_requested.set())
        assert train(recipe_record(train={"micro_batch": 4}), tmp_path) == 0
    assert train(recipe_record(train={"micro_batch": planned}), tmp_path) == 0
    assert [event["micro_batch"] for event in events(tmp_path, "start")] == [4, then]
    assert len(events(tmp_path, "warning")) == (1 if then == 2 else 3)
    assert events(tmp_path)[-1]["reason"] == "done"


def test_a_retried_step_may_take_as_long_as_the_first(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    def full(ids: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        patience.append(patience_s(tmp_path))
        if len(patience) == 4 * 4 + 3 and len(ids) > 1:  # the third micro-batch of the fifth step
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    tamper(monkeypatch, full)
    assert train(recipe_record(model=NO_DROPOUT), tmp_path) == 0
    assert patience[:4] == [UNKNOWN_S] * 4
    assert max(patience[4:19]) < UNKNOWN_S
    assert patience[19:27] == [UNKNOWN_S] * 8, "the fifth step in eight portions"


@pytest.mark.parametrize("preset", ["faithful", "modern"])
def test_without_dropout_no_random_number_matters(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    keys = {"dropout": 0.0} | ({"preset": preset, "bias": False, "tied": False} if preset == "modern" else {})
    assert train(recipe_record(model=keys), tmp_path / "undisturbed") == 0

    def disturb(_: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        torch.seed()
        return loss

    tamper(monkeypatch, disturb)
    assert train(recipe_record(model=keys), tmp_path / "disturbed") == 0
    assert losses(tmp_path / "disturbed") == losses(tmp_path / "undisturbed")
    assert weights(tmp_path / "disturbed", 20) == weights(tmp_path / "undisturbed", 20)


def test_the_scale_follows_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.optim.GROWTH_STEPS", 3)
    ours, parameter = LossScale(True), torch.nn.Parameter(torch.zeros(1))
    theirs, optimizer = torch.amp.GradScaler("cpu", growth_interval=3), torch.optim.SGD([parameter], lr=1.0)
    for overflow in (True, False, False, True, False, False, False, False, False, False, True, True, False):
        theirs.scale(parameter.sum() * (math.inf if overflow else 1.0)).backward()
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.update(overflow)
        assert ours.value == theirs.get_scale()
    restored = LossScale(True)
    restored.restore(json.loads(json.dumps(ours.as_record())))
    assert restored == ours


def test_cards_without_bf16_get_fp16_and_may_be_told_otherwise() -> None:
    assert precision_of_card("auto", "NVIDIA A100", True) == "bf16"
    assert precision_of_card("auto", "Tesla T4", False) == "fp16"
    assert [precision_of_card(word, "NVIDIA A100", True) for word in ("fp16", "fp32")] == ["fp16", "fp32"]
    with pytest.raises(Refused, match=r'"bf16".*Tesla T4'):
        precision_of_card("bf16", "Tesla T4", False)


@pytest.mark.slow
def test_fp16_learns_as_fp32_and_counts_its_overflows(tmp_path: Path, train: Train) -> None:
    for precision in ("fp32", "fp16"):
        assert train(recipe_record(train={"precision": precision}), tmp_path / precision) == 0
    skipped = [event["skipped_steps"] for event in events(tmp_path / "fp16", "step")]
    assert skipped[-1] == 0
    full, half = losses(tmp_path / "fp32"), losses(tmp_path / "fp16")
    assert half != full
    assert half == pytest.approx(full, rel=2e-2)
    assert {t.dtype for t in read_checkpoint(tmp_path / "fp16", 20).model.values()} == {torch.float32}


def test_an_overflow_of_fp16_halves_the_scale_and_moves_nothing(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def overflow_gradient(_: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4 * 10 + 1:  # in step 11: a finite loss with an infinite gradient
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    tamper(monkeypatch, overflow_gradient)
    train_keys = {"precision": "fp16", "checkpoint_every": 1, "steps": 11}
    assert train(recipe_record(train=train_keys, sample={"prompts": []}), tmp_path) == 0
    assert [event["skipped_steps"] for event in events(tmp_path, "step")] == [0] * 10 + [1]
    assert weights(tmp_path, 11) == weights(tmp_path, 10)
    states = [read_checkpoint(tmp_path, step).state for step in (10, 11)]
    assert [state["loss_scale"] for state in states] == [
        {"value": 65536.0, "good_steps": 10},
        {"value": 32768.0, "good_steps": 0},
    ]


@pytest.mark.slow
def test_a_run_whose_every_step_overflowed_resumes_exactly(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, report = 0, Reporter.step

    def overflow_gradient(_: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls <= 4 * 3:  # the first three steps, as if the scale were too large for this model
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    def dying(self: Reporter, number: int, values: dict[str, Any]) -> None:
        report(self, number, values)
        assert number < 3

    recipe = recipe_record(train={"precision": "fp16", "checkpoint_every": 2}, sample={"prompts": []})
    tamper(monkeypatch, overflow_gradient)
    assert train(recipe, tmp_path / "straight") == 0
    calls = 0
    with monkeypatch.context() as once:
        once.setattr(Reporter, "step", dying)
        assert train(recipe, tmp_path / "out") == 1
    assert read_checkpoint(tmp_path / "out", 2).optimizer == {}, "it has not moved yet, and remembers nothing"
    calls = 4 * 2
    assert train(recipe, tmp_path / "out") == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "straight")
    assert weights(tmp_path / "out", 20) == weights(tmp_path / "straight", 20)


def test_fp16_that_overflows_at_any_scale_has_diverged(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(_: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    tamper(monkeypatch, diverged)
    assert train(recipe_record(train={"precision": "fp16"}), tmp_path) == 3
    assert "step 17 " in events(tmp_path)[-1]["message"]


def spiking(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Multiply the loss of one step, and so its gradient, by five."""
    calls = 0
    monkeypatch.setattr(optim, "SPIKE_WINDOW", 6)

    def jump(_: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss * (5 if 4 * (step - 1) < calls <= 4 * step else 1)

    tamper(monkeypatch, jump)


@pytest.mark.parametrize("what", ["off", "warn", "skip"])
def test_a_spike_is_passed_over_told_or_skipped(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    spiking(monkeypatch, 9)
    keys = {"spike": what, "checkpoint_every": 1, "steps": 9}
    assert train(recipe_record(train=keys, sample={"prompts": []}), tmp_path) == 0
    warnings = events(tmp_path, "warning")
    assert [warning["code"] for warning in warnings] == ([] if what == "off" else ["train.spike"])
    assert (weights(tmp_path, 9) == weights(tmp_path, 8)) is (what == "skip")
    assert events(tmp_path, "step")[-1]["skipped_steps"] == (what == "skip")
    if warnings:
        assert lacking(warnings[0]["message"], "step 9 ", "loss", "standard deviations", "6 steps") == []


def test_a_spike_that_stops_leaves_what_was_before(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiking(monkeypatch, 9)
    assert train(recipe_record(train={"spike": "stop", "log_every": 100}), tmp_path) == 5
    stop, last = events(tmp_path)[-1], events(tmp_path, "step")[-1]
    assert (stop["reason"], stop["step"], manifest(tmp_path)["latest"]) == ("spike", 8, 8)
    assert (last["step"], last["loss"]) == (8, stop["final_loss"]), "the receipt has the last step that was told"
    assert weights(tmp_path, 8)


def test_a_run_stopped_at_a_spike_resumes_once_it_may_skip(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiking(monkeypatch, 9)
    assert train(recipe_record(train={"spike": "stop"}), tmp_path) == 5
    spiking(monkeypatch, 1)
    assert train(recipe_record(train={"spike": "stop"}), tmp_path) == 5, "the same step, the same tokens, the same jump"
    spiking(monkeypatch, 1)
    assert train(recipe_record(train={"spike": "skip", "spike_z": 6.0}), tmp_path) == 0
    assert events(tmp_path, "step")[-1]["skipped_steps"] == 1


def test_only_a_jump_upwards_after_a_full_window_is_a_spike() -> None:
    guard = SpikeGuard(7.0)
    for step in range(optim.SPIKE_WINDOW):
        assert guard.judge(1e9, 1e9) is None
        guard.remember(3.0 + 0.1 * (-1) ** step, 1.0)
    assert guard.judge(3.6, 1.0) is None  # six standard deviations
    assert guard.judge(0.1, 0.0) is None
    assert lacking(str(guard.judge(3.9, 1.0)), "loss 3.9", "9.0") == []
    assert "norm 2" in str(guard.judge(3.0, 2.0))
    assert guard.judge(3.0, 1.001) is None  # norms that never differed have no spread
    for _ in range(optim.SPIKE_WINDOW // 2):
        guard.remember(3.9, math.inf)
    assert guard.judge(3.9, 1.0) is None, "a level that lasts is no spike any more"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"precision": "fp16"}, {"spike": "skip", "spike_z": 0.5}])
def test_a_resumed_run_judges_and_scales_as_a_straight_one(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    monkeypatch.setattr(optim, "SPIKE_WINDOW", 4)
    monkeypatch.setattr("trainer.optim.GROWTH_STEPS", 4)
    recipe = recipe_record(train=keys)
    assert train(recipe, tmp_path / "straight") == 0
    report = Reporter.step

    def dying(self: Reporter, step: int, values: dict[str, Any]) -> None:
        report(self, step, values)
        if step == 13:
            raise RuntimeError("the machine is gone")

    with monkeypatch.context() as once:
        once.setattr(Reporter, "step", dying)
        assert train(recipe, tmp_path / "out") == 1
    assert train(recipe, tmp_path / "out") == 0
    assert events(tmp_path / "out", "start")[1]["resumed_from"] == 10
    assert losses(tmp_path / "out") == losses(tmp_path / "straight")
    straight, resumed = (events(tmp_path / name, "step")[-1]["skipped_steps"] for name in ("straight", "out"))
    assert straight == resumed > 0
    assert weights(tmp_path / "out", 20) == weights(tmp_path / "straight", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batch", "stop"), [(2, "signal"), (4, "signal"), (8, "crash")])
def test_a_stopped_run_resumes_with_the_same_losses_however_cut(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, micro_batch: int, stop: str
) -> None:
    dropout = {"dropout": 0.1 if micro_batch == 2 else 0.0}  # its masks depend on the cut
    assert train(recipe_record(model=dropout), tmp_path / "straight") == 0
    kept: list[TrainingRun] = []
    report = Reporter.step

    def stopping(self: Reporter, step: int, values: dict[str, Any]) -> None:
        report(self, step, values)
        if step == 13 and stop == "signal":
            kept[0].io.stop_requested.set()
        assert step < 13 or stop == "signal"

    with monkeypatch.context() as once:
        once.setattr("trainer.train.open_run", lambda *a, **k: kept.append(open_run(*a, **k)) or kept[0])
        once.setattr(Reporter, "step", stopping)
        assert train(recipe_record(model=dropout), tmp_path / "out") == (0 if stop == "signal" else 1)
    assert train(recipe_record(model=dropout, train={"micro_batch": micro_batch}), tmp_path / "out") == 0
    resumed = events(tmp_path / "out", "start")[1]
    assert (resumed["resumed_from"], resumed["micro_batch"]) == (14 if stop == "signal" else 10, micro_batch)
    wanted = losses(tmp_path / "straight")
    assert losses(tmp_path / "out") == (wanted if micro_batch == 2 else pytest.approx(wanted, rel=1e-5))
