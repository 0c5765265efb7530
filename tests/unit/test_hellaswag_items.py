"""Tests of HellaSwag's questions beside the shards: tokenised as evaluated, all or none, and required before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.data.hellaswag import write_items
from gpurun.data.prepare import PrepareOrder, prepare
from gpurun.data.run_shards import prepare_run_shards
from gpurun.jobs.training.recipe import load_recipe, resolve
from tests.refusals import refusal
from trainer.items import read_items
from trainer.tokenizer import Gpt2Tokenizer, shipped_gpt2_tokens

QUESTION = {
    "ind": 24,
    "ctx": "A man is sitting on a roof. he",
    "endings": ["is using wrap.", "is ripping level tiles off.", "is holding a cube.", "starts pulling up roofing."],
    "label": 3,
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The quick brown fox number {number} jumps over the lazy dog.\n" for number in range(200)))
    prepare(PrepareOrder(str(text), "gpt2", tmp_path / "shards"), print)
    return tmp_path / "shards"


def questions(folder: Path, *records: Any) -> Path:
    path = folder / "hellaswag_val.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_questions_become_items_with_endings_after_a_space(shards: Path, tmp_path: Path) -> None:
    """A label may also be a string, as in the Hub's copy of the questions."""
    asked = questions(tmp_path, QUESTION, {**QUESTION, "label": 0}, {**QUESTION, "label": "2"})
    assert write_items(asked, shards, print) == (shards / "hellaswag.jsonl", 3)
    first, *others = read_items(shards, 3, 50257)
    gpt2 = Gpt2Tokenizer(shipped_gpt2_tokens())
    texts = [QUESTION["ctx"], *(f" {ending}" for ending in QUESTION["endings"])]
    assert [first.context, *first.endings] == [tuple(ids.tolist()) for ids in gpt2.encode(texts)]
    assert [item.label for item in (first, *others)] == [3, 0, 2]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({**QUESTION, "label": None}, "data.no_question"),
        ({key: value for key, value in QUESTION.items() if key != "label"}, "data.no_question"),
        ({**QUESTION, "label": 4}, "data.no_question"),
        ({**QUESTION, "label": "4"}, "data.no_question"),
        ({**QUESTION, "label": ""}, "data.no_question"),
        ({**QUESTION, "endings": ["one", "two", "three"]}, "data.no_question"),
        ({**QUESTION, "ctx": ""}, "data.no_question"),
        (["no", "object"], "data.no_question"),
        (None, "data.empty"),
    ],
)
def test_what_is_no_question_is_named_and_leaves_nothing_behind(
    shards: Path, tmp_path: Path, line: Any, code: str
) -> None:
    before = sorted(shards.iterdir())
    file = questions(tmp_path, QUESTION, line) if line is not None else questions(tmp_path)
    with pytest.raises(UsageError) as refused:
        write_items(file, shards, print)
    assert refused.value.code == code
    assert code == "data.empty" or "Line 2" in refused.value.what
    assert sorted(shards.iterdir()) == before


def test_a_folder_without_shards_and_a_missing_file_are_refused(shards: Path, tmp_path: Path) -> None:
    with refusal(UsageError, "data.bad_manifest", "folder"):
        write_items(questions(tmp_path, QUESTION), tmp_path, print)
    with refusal(UsageError, "data.unreadable", "none.jsonl", "No such file"):
        write_items(tmp_path / "none.jsonl", shards, print)


def test_a_run_that_wants_them_ships_them_or_is_refused_early(shards: Path, tmp_path: Path) -> None:
    wishes = ("eval.hellaswag_items=1", "data.tokenizer=gpt2", "model.vocab_size=50257", "train.batch_tokens=64")
    recipe = resolve(load_recipe("mini-gpt"), "full", wishes).record

    def beside(into: str) -> Path:
        found = prepare_run_shards(recipe, str(shards), into=tmp_path / into, cache=tmp_path / "cache", say=print)
        return Path(found.beside)

    with refusal(UsageError, "data.no_hellaswag") as refused:
        beside("without")
    assert f"gpurun data hellaswag hellaswag_val.jsonl {shards}" in refused.value.hint
    write_items(questions(tmp_path, QUESTION), shards, print)
    assert len(read_items(beside("with"), 1, 50257)) == 1
    with (shards / "hellaswag.jsonl").open("a") as file:
        file.write("and half a line")
    beside("with a damage that is never read")
    (shards / "hellaswag.jsonl").write_text('{"context": [1], "endings": [[1], [2], [3], [50257]], "label": 0}\n')
    with refusal(UsageError, "data.untrainable", "line 1", "hellaswag.jsonl") as refused:
        beside("damaged")
    assert "gpurun data hellaswag" in refused.value.hint
