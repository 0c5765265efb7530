"""Tests of the trainer without gpurun: it prepares a text and trains by a TOML recipe, with --rehearse and --set."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from tests.refusals import lacking
from tests.trainer.tiny_training import ROOT, TEXT, events, recipe_record
from trainer import prepare
from trainer.recipe import parse_recipe
from trainer.recipe_file import read_recipe
from trainer.train import main

MINI = ROOT / "recipes" / "mini-gpt.toml"
TINY = ["--set", "width=16", "--set", "model.context=16", "--set", "eval.tokens=256", "--set", "sample.tokens=4"]
PROMPTS = ["--set", 'prompts=["the "]']  # A prompt that occurs in TEXT; mini-gpt's own do not.


@pytest.fixture(autouse=True)
def _as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)


def test_a_text_is_prepared_and_trained_on_by_a_toml_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, data, out = tmp_path / "text", tmp_path / "data", tmp_path / "out"
    text.write_text(TEXT)
    recipe = ["--recipe", str(MINI), "--rehearse", *PROMPTS]
    monkeypatch.setattr(sys, "argv", ["prepare", str(text), *recipe, "--out", str(data)])
    assert prepare.main() == 0
    assert main([*recipe, *TINY, "--set", "train.steps=2", "--data", str(data), "--out", str(out)]) == 0
    start, stop = events(out, "start")[0], events(out, "stop")[0]
    assert (start["steps"], start["tokens_per_step"]) == (2, 1024), "--set's, and the rehearsal's"
    assert (stop["reason"], stop["step"]) == ("done", 2)
    padded = 64  # The text's 28 characters, padded, because mini-gpt's vocab_size is 0.
    assert start["parameters"] == (padded + 16) * 16 + 2 * (12 * 16 * 16 + 9 * 16 + 4 * 16) + 2 * 16


def test_it_imports_only_torch_and_numpy_but_to_make_tokens() -> None:
    """Only the modules in trainer/ itself count: its folders `translation` and `huggingface` need other packages."""
    allowed = sys.stdlib_module_names | {"torch", "numpy", "trainer"}
    for file in sorted((ROOT / "trainer").glob("*.py")):
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        roots = {name.split(".")[0] for name in names}
        assert roots <= allowed | ({"tiktoken"} if file.name == "tokenizer.py" else set()), file.name


def test_without_rehearse_the_recipe_is_as_it_is_written(tmp_path: Path) -> None:
    assert read_recipe(MINI).train.steps == 500
    assert read_recipe(MINI, rehearse=True).train.steps == 120
    inner = ["rehearsal.train.steps=7"]
    assert read_recipe(MINI, overrides=inner, rehearse=True).train.steps == 7
    assert read_recipe(MINI, overrides=[*inner, "steps=9"], rehearse=True).train.steps == 9
    assert read_recipe(MINI, rehearse=True).hardware.on_cpu == "as_written"


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("train.stpes=2", ("train.stpes", "train.steps")),
        ("train.steps=0", ("train.steps is 0", "at least 1")),
        ("tokens=5", ("eval.tokens", "sample.tokens")),
        ("steps", ("key=value",)),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(
    word: str, facts: tuple[str, ...], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--recipe", str(MINI), "--set", word, "--data", str(data), "--out", str(tmp_path)]
    assert main(argv) == 2
    message = events(tmp_path, "stop")[0]["message"]
    assert lacking(message, *facts) == []
    assert message in capsys.readouterr().out


def test_a_toml_file_that_is_none_is_refused(data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    assert main(["--recipe", str(broken), "--data", str(data), "--out", str(tmp_path)]) == 2
    assert lacking(events(tmp_path, "stop")[0]["message"], str(broken), "TOML") == []


def test_recipe_json_is_read_whole_and_unchanged(tmp_path: Path) -> None:
    record = recipe_record(rehearsal={"train": {"steps": 5}})
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(record))
    assert read_recipe(file) == parse_recipe(record)
    assert read_recipe(file).as_record() == record
