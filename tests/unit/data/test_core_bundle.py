"""Tests of CORE's bundle as token ids: its questions are those of nanochat, and another file is refused by name."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import UsageError
from gpurun.data.core_bundle import bundle_file, write_core
from tests.core_bundle import ANIMALS, GO_ON, META, WHO, YAML, write_bundle
from tests.refusals import refusal
from trainer.shards import write_json
from trainer.tokenizer import load_gpt2


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a folder of shards whose manifest names GPT-2's tokeniser."""
    write_json(tmp_path / "data.json", {"tokenizer": {"name": "gpt2"}})
    return tmp_path


def items_of(bundle: Path, shards: Path, most: int = 100) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    write_core(bundle, most, shards, shards, lambda _: None)
    head, *items = map(json.loads, (shards / "core.jsonl").read_text().splitlines())
    return head, items


def asked(item: dict[str, Any]) -> list[tuple[str, str]]:
    """Return for each row of an item the text before the answer, and the answer whose probability is measured."""
    tokenizer = load_gpt2(lambda _: None)
    texts = []
    for row, count in zip(item["rows"], item["asked"], strict=True):
        ids = [*item["prefix"], *row]
        assert ids[0] == tokenizer.eot_id
        assert tokenizer.eot_id not in ids[1:]
        read, end = (b"".join(tokenizer.tokens[i] for i in some).decode() for some in (ids[1:-count], ids[-count:]))
        texts.append((read, end))
    return texts


def drawn(questions: list[dict[str, Any]], index: int, shots: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a question and its examples as the published evaluation draws them."""
    order = [*questions]
    random.Random(1337).shuffle(order)
    others = [i for i in range(len(order)) if i != index]
    return order[index], [order[i] for i in random.Random(1234 + index).sample(others, shots)]


def test_each_task_is_asked_in_the_published_words_and_order(shards: Path) -> None:
    bundle = write_bundle(shards / "bundle.zip")
    head, items = items_of(bundle, shards)
    assert head["bundle_sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert [(one["label"], one["random_baseline"], one["items"]) for one in head["tasks"]] == [
        ("animals", 25, 7), ("who_is_it", 50, 7), ("go_on", 0, 7)
    ]  # fmt: skip
    for index in (0, 6):
        question, (first, second) = drawn(ANIMALS, index, 2)
        examples = "".join(f"{one['query']}\nAnswer: {one['choices'][one['gold']]}\n\n" for one in (first, second))
        for (read, end), choice in zip(asked(items[index]), question["choices"], strict=True):
            assert read + end == f"{examples}{question['query']}\nAnswer: {choice}"
            assert choice.endswith(end.strip())
        assert items[index]["label"] == question["gold"]

        question, _ = drawn(WHO, index, 0)
        for (read, end), context in zip(asked(items[7 + index]), question["context_options"], strict=True):
            assert (read, end) == (context, " was full.")

        question, (example,) = drawn(GO_ON, index, 1)
        ((read, end),) = asked(items[14 + index])
        assert read == f"{example['context'].strip()} one\n\n{question['context'].strip()}"
        assert (end, items[14 + index]["label"]) == (" one", None)


def test_questions_and_examples_are_the_first_after_shuffling(shards: Path) -> None:
    head, items = items_of(write_bundle(shards / "bundle.zip", folder=""), shards, most=3)
    assert [one["items"] for one in head["tasks"]] == [3, 3, 3]
    order = [*ANIMALS]
    random.Random(1337).shuffle(order)
    texts = asked(items[0])[0][0]
    assert all(one["query"] in texts for one in order[:3])


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"core": None}, "core.yaml"),
        ({"core": "icl_tasks: ["}, "core.yaml"),
        ({"core": "icl_tasks: !!python/object/apply:os.system ['touch /tmp/never']"}, "core.yaml"),
        ({"core": YAML.replace("schema", "essay")}, "'essay'"),
        ({"core": YAML.replace("knowledge/animals", "../../animals")}, "animals"),
        ({"core": YAML.replace("[2]", "[7]")}, "animals has 7 "),
        ({"eval_meta_data": META.replace("25", "100")}, "animals"),
        ({"eval_meta_data": "Eval Task\n"}, "eval_meta_data.csv"),
        ({"animals": None}, "eval_data/knowledge/animals.jsonl"),
        ({"animals": "[]\n" * 9}, "animals.jsonl"),
        ({"who": '{"context_options": ["a"], "continuation": "b", "gold": 1}\n'}, "gold"),
        ({"go_on": '{"context": 5, "continuation": "b"}\n' * 3}, "go_on.jsonl"),
    ],
)
def test_what_is_no_bundle_is_refused_with_the_place(shards: Path, other: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError) as refused:
        items_of(write_bundle(shards / "bundle.zip", **other), shards)
    assert name in str(refused.value)
    assert not (shards / "core.jsonl").exists()


def test_a_missing_file_and_an_unencrypted_url_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.zip").write_text("no zip")
    with refusal(UsageError, "core.no_bundle", "no.zip"):
        write_core(tmp_path / "no.zip", 5, tmp_path, tmp_path, lambda _: None)
    for named in (str(tmp_path / "absent.zip"), "http://example.org/bundle.zip"):
        with pytest.raises(UsageError):
            bundle_file(named, tmp_path, lambda _: None)
