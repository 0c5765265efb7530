"""Tests that a replay reproduces an honest checkpoint bit for bit, and finds one whose weights were changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tiny_training import Train, events, recipe_record
from trainer.checkpoint import read_tensors, write_tensors
from trainer.errors import Refused
from trainer.replay import replay_steps

pytestmark = pytest.mark.torch
LAST = "checkpoints/000020.model.safetensors"


@pytest.fixture
def out(train: Train, tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    assert train(recipe_record(), folder) == 0
    return folder


def nudge(out: Path, by: float) -> None:
    """Add `by` to every weight of the last checkpoint, and delete the manifest that would reveal it."""
    weights = {name: tensor + by for name, tensor in read_tensors(out / LAST).items()}
    with (out / LAST).open("wb") as file:
        write_tensors(file.write, weights)
    (out / "MANIFEST.json").unlink()


@pytest.mark.parametrize("before", [0, 10])
def test_an_honest_run_comes_out_the_same_to_the_bit(out: Path, data: Path, before: int) -> None:
    replayed = replay_steps(out / LAST, data, again=[(before, 20)])
    (judged,) = [event for event in events(out, "eval") if event["step"] == 20]
    taken = {event["step"]: event["loss"] for event in events(out, "step") if event["step"] > before}
    assert (replayed["step"], replayed["device"], replayed["val_loss"]) == (20, "cpu", judged["val_loss"])
    replayed["again"][0]["alike"] = round(replayed["again"][0]["alike"], 9)
    assert replayed["again"] == [{"from": before, "to": 20, "equal": True, "most": 0.0, "alike": 1.0, "losses": taken}]


def test_weights_that_were_moved_by_a_thousandth_are_found(out: Path, data: Path) -> None:
    nudge(out, 1e-3)
    replayed = replay_steps(out / LAST, data, again=[(10, 20)])
    (judged,) = [event for event in events(out, "eval") if event["step"] == 20]
    assert abs(replayed["val_loss"] - judged["val_loss"]) > 1e-6
    (again,) = replayed["again"]
    assert again["equal"] is False
    assert again["most"] == pytest.approx(1e-3, rel=1e-2)


def test_nothing_of_the_run_is_changed(out: Path, data: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    replay_steps(out / LAST, data, again=[(10, 20)])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("lie", "fact"),
    [
        ({"step": 10}, "step"),
        ({"data": {"tokenizer": "0" * 64}}, "data.json"),
        ({"recipe": {}}, "recipe"),
        ({"recent": "nothing"}, "state"),
    ],
)
def test_a_state_that_lies_is_refused_by_name(out: Path, data: Path, lie: dict[str, Any], fact: str) -> None:
    state = out / "checkpoints" / "000020.state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | lie))
    with pytest.raises(Refused, match=fact):
        replay_steps(out / LAST, data)


def test_a_checkpoint_before_that_is_not_here_is_refused(out: Path, data: Path) -> None:
    with pytest.raises(Refused, match=r"000005"):
        replay_steps(out / LAST, data, again=[(5, 20)])


def test_spans_between_kept_checkpoints_are_taken_again(train: Train, data: Path, tmp_path: Path) -> None:
    """A span that ends without a checkpoint has only losses to compare."""
    recipe = recipe_record()
    recipe["train"] |= {"steps": 40, "checkpoint_every": 5, "keep_checkpoints": 4}
    assert train(recipe, tmp_path / "out") == 0
    kept = sorted(int(path.name[:6]) for path in (tmp_path / "out" / "checkpoints").glob("*.state.json"))
    assert {10, 20, 30, 35, 40} <= {*kept}, "every second one, and the latest two"
    last = tmp_path / "out" / "checkpoints" / "000040.model.safetensors"
    again = replay_steps(last, data, again=[(10, 20), (20, 23)])["again"]
    losses = {event["step"]: event["loss"] for event in events(tmp_path / "out", "step")}
    assert [(span["from"], span["to"], span["equal"]) for span in again] == [(10, 20, True), (20, 23, None)]
    assert all(losses[step] == loss for span in again for step, loss in span["losses"].items() if step in losses)


def test_a_given_recipe_is_believed_and_not_the_checkpoints(out: Path, data: Path, tmp_path: Path) -> None:
    other = recipe_record()
    other["optim"]["lr"] = 0.5
    (tmp_path / "recipe.json").write_text(json.dumps(other))
    with pytest.raises(Refused, match=r"optim\.lr"):
        replay_steps(out / LAST, data, recipe=tmp_path / "recipe.json")
