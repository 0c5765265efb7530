"""Tests that recipe.json is read strictly: every key, no other key, and an error that names whatever is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tiny_training import recipe_record
from trainer.errors import Refused
from trainer.recipe import TABLES, RecipeError, RehearsalConfig, parse_recipe
from trainer.recipe_file import differing_keys, read_recipe


def test_a_recipe_comes_back_as_it_was_written() -> None:
    record = recipe_record()
    assert parse_recipe(record).as_record() == record


@pytest.mark.parametrize(
    ("table", "keys", "facts"),
    [
        ("train", {"stepz": 3}, "train.stepz.*train.steps"),
        ("train", {"steps": 0}, "train.steps is 0"),
        ("train", {"steps": True}, "train.steps is true"),
        ("train", {"steps": 1.5}, "train.steps is 1.5"),
        ("train", {"seed": -1}, "train.seed is -1"),
        ("train", {"precision": "fp8"}, "train.precision"),
        ("model", {"heads": 3}, "model.width 16 .*model.heads 3"),
        ("model", {"dropout": 1.0}, "model.dropout"),
        ("model", {"preset": "gpt3"}, "model.preset"),
        ("model", {"bias": "yes"}, "model.bias"),
        ("optim", {"lr": float("nan")}, "finite"),
        ("optim", {"beta2": 1.0}, "optim.beta2"),
        ("schedule", {"warmup_steps": 21}, "schedule.warmup_steps 21 .*train.steps 20"),
        ("schedule", {"min_lr": 1.0}, "optim.lr"),
        ("schedule", {"kind": "linear"}, "schedule.kind"),
        ("sample", {"prompts": "the "}, 'sample.prompts is "the "'),
        ("rehearsal", {"model": {"widht": 3}}, "rehearsal.model.widht"),
    ],
)
def test_a_wrong_key_or_value_is_named(table: str, keys: dict[str, Any], facts: str) -> None:
    with pytest.raises(RecipeError, match=re.sub(r"\.(?!\*)", r"\\.", facts)):
        parse_recipe(recipe_record(**{table: keys}))


def test_every_key_of_every_table_is_required() -> None:
    for table, keys in recipe_record().items():
        for key in keys if isinstance(keys, dict) and table != "rehearsal" else []:
            record = recipe_record()
            del record[table][key]
            with pytest.raises(RecipeError, match=f"{table}\\.{key}"):
                parse_recipe(record)


def test_a_recipe_that_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    with pytest.raises(Refused, match="No such file"):
        read_recipe(file)
    for text in ("{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(Refused, match="JSON"):
            read_recipe(file)
    file.write_text(json.dumps([]))
    with pytest.raises(Refused, match="a table"):
        read_recipe(file)


def test_keys_and_defaults_are_those_of_the_formats_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "FORMATS.md").read_text(encoding="utf-8")
    for table, kind in [*TABLES.items(), ("rehearsal", RehearsalConfig)]:
        row = next(line for line in page.splitlines() if line.startswith(f"| `[{table}]`"))
        said = dict(re.findall(r"`([a-z_0-9]+)` ([^`|]*)", row.split("|", 2)[2]))
        for key in fields(kind):
            if table == "rehearsal" and key.name != "processes":
                assert f"`{key.name}`" in row
            else:
                assert key.name in said, f"{table}.{key.name}"
                stated = re.search(r"true|false|[0-9][0-9e.-]*", said[key.name].split("(")[0])
                wanted = json.loads(stated[0]) if stated else MISSING
                if isinstance(key.default, str):  # The page lists the default word first; no word means "".
                    wanted = next(iter(re.findall(r'"(.*?)"', said[key.name])), "")
                assert key.default == wanted, f"{table}.{key.name}: {said[key.name]}"


def test_only_what_changes_the_training_tells_two_recipes_apart() -> None:
    old = recipe_record()
    same = recipe_record(train={"log_every": 5, "micro_batch": 1, "compile": True}, sample={"tokens": 1})
    other = recipe_record(optim={"lr": 2e-2}, model={"layers": 3})
    assert differing_keys(old, same) == []
    assert differing_keys(old, other) == ["model.layers", "optim.lr"]
    longer = recipe_record(train={"steps": old["train"]["steps"] + 1})
    assert (differing_keys(old, longer), differing_keys(longer, old)) == ([], ["train.steps"])
