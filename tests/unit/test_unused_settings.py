"""Tests that a plan names exactly the settings for text that have no effect on finished shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.core.run_plan import Request
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.jobs.training.recipe import Form, load_recipe, resolve
from gpurun.planning.transfer import unused_notes
from tests.plan_makers import make_plan
from tests.refusals import lacking
from tests.unit.data_verbs import WORDS, gpurun


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of character shards with a fifth of the text held out."""
    place = tmp_path_factory.mktemp("made")
    lines = (f"The quick brown fox number {number} jumps over the lazy dog.\n" for number in range(400))
    (place / "text").write_text("".join(lines))
    prepare(PrepareOrder(str(place / "text"), "char", place / "shards", val_fraction=0.2), print)
    return place / "shards"


def own_recipe(folder: Path, data: str) -> Path:
    """Write mini-gpt's recipe with this line instead of its `limit_mb`, and return its path."""
    text = Path(load_recipe("mini-gpt").path).read_text()
    path = folder / "own.toml"
    path.write_text(text.replace("limit_mb = 4            # more than the training reads", data))
    return path


def notes(recipe: Path, shards: Path, *overrides: str, form: Form = "full", continues: str = "") -> str:
    loaded = load_recipe(str(recipe))
    request = Request(recipe=str(recipe), data=str(shards), overrides=overrides, continues=continues)
    return " ".join(unused_notes(request, loaded, resolve(loaded, form, overrides).record["data"]))


def test_what_set_asks_of_finished_shards_is_said_to_do_nothing(tmp_path: Path, shards: Path) -> None:
    recipe = own_recipe(tmp_path, "")
    assert notes(recipe, shards) == ""
    said = notes(recipe, shards, "limit_mb=5", "data.val_fraction=0.5")
    assert lacking(said, "data.limit_mb 5", "data.val_fraction 0.5", "20.1%") == []
    assert notes(recipe, shards, "data.val_fraction=0.21") == ""
    assert "data.val_fraction 0.1 " in notes(recipe, shards, "data.val_fraction=0.1")


def test_unused_recipe_settings_are_named_but_not_a_rehearsals(tmp_path: Path, shards: Path) -> None:
    assert "data.limit_mb 3 " in notes(own_recipe(tmp_path, "limit_mb = 3"), shards)
    assert "data.val_fraction 0.02 " in notes(own_recipe(tmp_path, "val_fraction = 0.02"), shards)
    recipe = own_recipe(tmp_path, "")
    recipe.write_text(recipe.read_text() + "data = { limit_mb = 2 }\n")
    assert notes(recipe, shards, form="rehearsal") == ""
    assert "data.limit_mb 2" in notes(recipe, shards, "rehearsal.data.limit_mb=2", form="rehearsal")


def test_a_vocabulary_size_other_than_the_shards_is_named(tmp_path: Path, shards: Path) -> None:
    recipe = own_recipe(tmp_path, "vocab_size = 4096")
    recipe.write_text(recipe.read_text().replace('"char"', '"bpe"'))
    assert "data.vocab_size 4096 " in notes(recipe, shards)
    size = json.loads((shards / "data.json").read_text())["tokenizer"]["vocab_size"]
    manifest = json.loads((shards / "data.json").read_text())
    manifest["tokenizer"]["vocab_size"] = 4096
    other = tmp_path / "bpe"
    other.mkdir()
    (other / "data.json").write_text(json.dumps(manifest))
    assert size != 4096
    assert notes(recipe, other) == ""


def test_text_and_a_run_that_goes_on_are_told_nothing(tmp_path: Path, shards: Path) -> None:
    recipe = own_recipe(tmp_path, "limit_mb = 3")
    assert notes(recipe, shards.parent / "text") == ""
    assert notes(recipe, shards, continues="fox-41") == ""


def test_the_plan_says_it(tmp_path: Path, shards: Path) -> None:
    request = Request(recipe="mini-gpt", data=str(shards), dry_run=True, overrides=("data.limit_mb=5",))
    home = Home(tmp_path).prepare()
    plan = make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)
    assert [note for note in plan.warnings if "data.limit_mb 5 " in note]


def test_prepare_uses_the_recipe_files_hold_out_as_a_run_does(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_text("".join(f"{number:,} {WORDS}" for number in range(15_000)))
    found = {}
    for name, data, flags in (
        ("named", "val_fraction = 0.4\nlimit_mb = 1", []),
        ("chosen", "", ["--val-fraction", "0.1"]),
    ):
        recipe = own_recipe(tmp_path, data)
        arguments = ["data", "prepare", str(recipe), "--source", str(source), "--out", str(tmp_path / name), *flags]
        done = gpurun(*arguments, home=tmp_path / "home")
        assert done.returncode == 0, done.stderr
        assert ("data.limit_mb" in done.stderr) is (name == "named")
        manifest = json.loads((tmp_path / name / "data.json").read_text())
        tokens = [sum(shard["tokens"] for shard in manifest[part]) for part in ("val", "train")]
        found[name] = sum(tokens) / source.stat().st_size, tokens[0] / sum(tokens)
    assert found["named"] == pytest.approx((2**20 / source.stat().st_size, 0.4), abs=0.03)
    assert found["chosen"] == pytest.approx((1, 0.1), abs=0.03)
