"""Tests that every bundled recipe trains in its rehearsal form: four steps on real text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.data.run_shards import prepare_run_shards
from gpurun.jobs.training.recipe import list_recipes, load_recipe, resolve
from tests.trainer.tiny_training import Train, events, manifest

STEPS = ("train.steps=4", "train.checkpoint_every=4", "train.log_every=1", "eval.every=4")
SHORT = (*STEPS, "schedule.warmup_steps=1", "sample.tokens=4")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the tokenised text that several recipes share."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("name", list_recipes())
def test_every_bundled_recipe_trains_in_its_rehearsals_form(
    name: str, cache: Path, tmp_path: Path, train: Train
) -> None:
    recipe = resolve(load_recipe(name), "rehearsal", SHORT).record
    if recipe["train"]["loop"] == "huggingface":
        pytest.importorskip("transformers", reason="an extra")
    data = tmp_path / "data"
    prepare_run_shards(recipe, None, into=data, cache=cache, say=lambda line: None)
    assert train(recipe, tmp_path / "out", data) == 0
    assert [event["step"] for event in events(tmp_path / "out", "step")] == [1, 2, 3, 4]
    assert manifest(tmp_path / "out")["latest"] == 4
    assert not events(tmp_path / "out", "warning"), "a first hour begins with this form, as it is"
    assert len(events(tmp_path / "out", "sample")) == len(recipe["sample"]["prompts"])
    assert (events(tmp_path / "out")[-1]["reason"], len(events(tmp_path / "out", "eval"))) == ("done", 1)
