"""Tests that a run continues exactly from an earlier run's checkpoint that was shipped with its shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tiny_training import Train, events, manifest, recipe_record, run_command, write_data

RECIPE = recipe_record()
"""A recipe of twenty steps with dropout that saves after every ten."""


@pytest.fixture
def straight(tmp_path: Path, train: Train) -> Path:
    """Train a run without interruption and return its out folder."""
    out = tmp_path / "straight"
    assert train(RECIPE, out) == 0
    return out


@pytest.fixture
def brought(tmp_path: Path, straight: Path) -> Path:
    """Return a data folder that contains that run's checkpoint of step 10, as `gpurun train --from` ships it."""
    folder, listed = write_data(tmp_path / "data"), manifest(straight)
    files = [file for file in listed["files"] if file["step"] == 10 and file["kind"] != "sample"]
    place = folder / "continue"
    (place / "checkpoints").mkdir(parents=True)
    for file in files:
        shutil.copyfile(straight / file["name"], place / file["name"])
    (place / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": 10, "best": None, "files": files}))
    return folder


def weights(out: Path) -> bytes:
    return (out / "checkpoints" / "000020.model.safetensors").read_bytes()


def refused(out: Path) -> str:
    """Assert that no step was trained, and return the message of the last event."""
    assert events(out, "step") == []
    return str(events(out)[-1]["message"])


def test_it_ends_bit_for_bit_where_the_uninterrupted_run_ended(
    tmp_path: Path, train: Train, straight: Path, brought: Path
) -> None:
    assert train(RECIPE, tmp_path / "out", brought) == 0
    assert [event["resumed_from"] for event in events(tmp_path / "out", "start")] == [10]
    assert [event["step"] for event in events(tmp_path / "out", "step")] == list(range(11, 21))
    assert weights(tmp_path / "out") == weights(straight)
    assert {file["step"] for file in manifest(tmp_path / "out")["files"]} == {20}, "the earlier one is at home already"


@pytest.mark.slow
def test_its_own_checkpoint_comes_first_once_there_is_one(
    tmp_path: Path, train: Train, straight: Path, brought: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(straight, out)
    assert train(RECIPE, out, brought) == 0
    assert events(out, "start")[-1]["resumed_from"] == 20


@pytest.mark.slow
def test_two_processes_go_on_from_what_one_had_saved(tmp_path: Path, straight: Path, brought: Path) -> None:
    done = run_command(RECIPE, brought, tmp_path / "out", processes=2)
    assert done.returncode == 0, done.stderr
    (start,) = events(tmp_path / "out", "start")
    assert (start["world_size"], start["resumed_from"]) == (2, 10)
    before, after = (events(out, "eval")[-1]["val_loss"] for out in (straight, tmp_path / "out"))
    assert after == pytest.approx(before, abs=0.05), "dropout draws other masks in two processes, nothing else differs"


def _empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def _altered(place: Path) -> None:
    path = place / "checkpoints" / "000010.model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def _torn(place: Path) -> None:
    (place / "checkpoints" / "000010.optim.safetensors").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "words"),
    [(_empty, "checkpoint"), (_altered, "damaged"), (_torn, "damaged")],
    ids=["empty", "altered", "torn"],
)
def test_it_does_not_start_over_where_it_was_to_go_on(
    tmp_path: Path, train: Train, brought: Path, harm: Any, words: str
) -> None:
    """A start from step 0 would cost the whole run once more."""
    harm(brought / "continue")
    assert train(RECIPE, tmp_path / "out", brought) == 2
    assert words in refused(tmp_path / "out")


@pytest.mark.slow
def test_a_checkpoint_of_another_recipe_is_refused_by_name(tmp_path: Path, train: Train, brought: Path) -> None:
    assert train(recipe_record(optim={"lr": 1e-3}), tmp_path / "out", brought) == 2
    assert "optim.lr" in refused(tmp_path / "out")
