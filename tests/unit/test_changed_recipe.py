"""Tests of a changed trainer: a separate process reads the recipe with its recipe.py and traces its model's memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.jobs.training import changed_recipe
from gpurun.jobs.training.changed_recipe import OwnReader, own_reader, traced_form
from gpurun.jobs.training.memory import GIB, fitting_micro_batch, peak_on
from gpurun.jobs.training.recipe import ResolvedRecipe, load_recipe, resolve
from gpurun.providers.catalog import offers_for, parse_gpu
from tests.refusals import refusal


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of gpurun's trainer, in a folder whose name cannot be a package's."""
    place = tmp_path / "fox-1.trainer.77"
    return Path(shutil.copytree(bundle_root() / "trainer", place, ignore=shutil.ignore_patterns("__pycache__")))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


@pytest.fixture
def experts(copy: Path) -> Path:
    """Return a trainer copy whose recipe accepts `experts` per layer (default 1) and the optimiser `lion`.

    Every expert processes every token.
    """
    edit(copy / "recipe.py", "    heads: Layers\n", "    heads: Layers\n    experts: Count = 1\n")
    edit(copy / "recipe.py", '["adamw", "muon"]', '["adamw", "muon", "lion"]')
    layer = "    layer = 2 * norm + 12 * width * width + (9 * width if model.bias else 0)\n"
    more = "    layer += (model.experts - 1) * (8 * width * width + (5 * width if model.bias else 0))\n"
    edit(copy / "recipe.py", layer, layer + more)
    edit(
        copy / "model.py",
        "        self.mlp = MLP(config)\n",
        "        self.mlp = nn.ModuleList(MLP(config) for _ in range(config.experts))\n",
    )
    edit(copy / "model.py", "x + self.mlp(self.ln_2(x))", "x + sum(expert(self.ln_2(x)) for expert in self.mlp)")
    return copy


def read(trainer: Path, *overrides: str) -> ResolvedRecipe:
    return resolve(load_recipe("gpt2-124m", own_reader(trainer)), "full", overrides)


def test_an_unchanged_reader_is_not_run(copy: Path) -> None:
    (copy / "model.py").write_text("raise RuntimeError\n")
    assert own_reader(copy) is None


def test_the_copys_own_key_and_value_are_in_the_recipe_and_count(experts: Path) -> None:
    usual, found = read(experts), read(experts, "experts=4", "optim.kind=lion")
    assert (found.record["model"]["experts"], found.record["optim"]["kind"]) == (4, "lion")
    assert found.tables.optim.kind == "adamw", "what gpurun plans by"
    assert usual.parameters(50257) == usual.official_parameters(50257)
    assert found.parameters(50257) - usual.parameters(50257) == 12 * 3 * (8 * 768 * 768 + 5 * 768)
    assert found.flops_per_token(50257) > usual.flops_per_token(50257)
    assert found.sha256 != usual.sha256


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (("expertz=4",), "recipe.refused", "experts"),
        (("experts=-1",), "recipe.refused", "model.experts is -1"),
        (("model.heads=7",), "recipe.refused", "model.heads 7"),
    ],
)
def test_what_the_copy_refuses_is_refused_in_its_words(
    experts: Path, overrides: tuple[str, ...], code: str, words: str
) -> None:
    with refusal(UsageError, code, words):
        read(experts, *overrides)


def _says(copy: Path, record: Any) -> None:
    """Replace the recipe reader of the trainer copy by a script that prints this record as JSON."""
    (copy / "recipe_file.py").write_text(f"print({json.dumps(json.dumps(record))})\n")


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ({"layers": "many"}, "recipe.bad_value"),
        ({"layers": 10**9}, "recipe.bad_value"),
        ({}, "recipe.missing_key"),
        ([1], "recipe.missing_key"),
    ],
)
def test_what_the_copy_allows_is_held_to_gpuruns_own_bounds(copy: Path, model: Any, code: str) -> None:
    _says(copy, {"recipe": {**load_recipe("gpt2-124m").tables.as_record(), "model": model}})
    with pytest.raises(UsageError) as refused:
        read(copy)
    assert refused.value.code == code


@pytest.mark.parametrize("text", ["raise RuntimeError('\\x1b[31mred')\n", "print('no JSON')\n", "print([1])\n", ""])
def test_a_reader_of_nothing_is_refused_in_harmless_words(copy: Path, text: str) -> None:
    (copy / "recipe_file.py").write_text(text)
    with pytest.raises(UsageError) as refused:
        read(copy)
    assert refused.value.code == "trainer.no_reader"
    assert "\x1b" not in str(refused.value)


def test_a_reader_that_does_not_end_is_ended(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_recipe, "READ_S", 1.0)
    (copy / "recipe_file.py").write_text("import time\ntime.sleep(60)\n")
    with refusal(UsageError, "trainer.no_reader", "1 s"):
        read(copy)


def test_a_reader_has_no_key_of_a_cloud(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_secret")
    (copy / "recipe_file.py").write_text(
        "import os\nraise SystemExit(f'keys: {[n for n in os.environ if \"KEY\" in n]}')\n"
    )
    with refusal(UsageError, "trainer.no_reader", "keys: []"):
        OwnReader(copy).read(Path("any.toml"))


def test_counts_that_cannot_be_are_refused(copy: Path) -> None:
    record = load_recipe("gpt2-124m").tables.as_record()
    _says(copy, {"recipe": record, "parameters": -5, "flops_per_token": 1e300})
    with refusal(UsageError, "trainer.no_reader", "parameters_of", "flops_per_token"):
        read(copy).parameters(50257)


@pytest.mark.slow
def test_a_changed_models_memory_is_traced_and_planned_with(experts: Path, tmp_path: Path) -> None:
    offer = offers_for(parse_gpu("1xA100"))[0]
    small = ("layers=2", "width=256", "heads=4", "experts=8", "batch_tokens=65536", "micro_batch=64", "context=1024")
    recipe = read(experts, *small)
    traced, note = traced_form(recipe, experts, 50257, tmp_path / "traced")
    assert "your trainer's" in note
    with_it, without = (peak_on(one, offer, 1, 64, 50257) for one in (traced, recipe))
    assert with_it - without > 14 * 10 * 64 * 1024 * 256, (
        "seven experts more keep their wide layer for 14 layers' worth"
    )
    assert fitting_micro_batch(traced, offer, 1, 50257) <= fitting_micro_batch(recipe, offer, 1, 50257)
    assert with_it / GIB < 80

    (experts / "traced_memory.py").unlink()
    again, said = traced_form(recipe, experts, 50257, tmp_path / "traced")
    assert said != note, "it is another trainer now: what was kept is not its"
    state = peak_on(again, offer, 1, 1, 50257) - peak_on(recipe, offer, 1, 1, 50257)
    more = recipe.parameters(50257) - recipe.official_parameters(50257)
    assert 16 * more <= state <= 17 * more


@pytest.mark.slow
def test_a_trace_is_made_once(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read(copy, "layers=1", "width=64", "heads=1", "batch_tokens=8192")
    first = traced_form(recipe, copy, 50257, tmp_path / "traced")
    monkeypatch.setattr(changed_recipe, "run_module", None)
    assert traced_form(recipe, copy, 50257, tmp_path / "traced") == first
    assert first[0].beyond_formula(4) < 2**20, "nothing is changed, and the formula is what was traced"
