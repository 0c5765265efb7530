"""Tests of CORE against an independent computation on made-up items, with one forward pass for each token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny_training import Train, events, recipe_record, write_data
from trainer.core_score import FILE, as_record, core_score
from trainer.distributed import Device, Processes
from trainer.errors import Refused
from trainer.model import GPT
from trainer.recipe import ModelConfig

CPU = Device(torch.device("cpu"), "fp32", None)
CONTEXT = 12


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    made = GPT(ModelConfig(layers=1, heads=2, width=16, context=CONTEXT, vocab_size=64), 50)
    with torch.no_grad():
        made.wte.weight.normal_(std=1.0)  # Some tokens become much likelier than others.
    return made


def log_probabilities(model: GPT, ids: list[int]) -> list[dict[int, float]]:
    """Return for each token but the first the log-probability of every token id, given the tokens before that place."""
    seen = []
    for place in range(1, len(ids)):
        before = torch.tensor([ids[:place]])
        with torch.no_grad():
            logits = model.next_token_logits(before, torch.tensor([place - 1]))[0]
        seen.append(dict(enumerate(torch.log_softmax(logits.double(), 0).tolist())))
    return seen


def by_hand(model: GPT, item: dict[str, Any]) -> bool:
    means, greedy = [], True
    for row, count in zip(item["rows"], item["asked"], strict=True):
        ids = [*item["prefix"], *row][-(CONTEXT + 1) :]
        count = min(count, len(ids) - 1)
        judged = list(zip(log_probabilities(model, ids), ids[1:], strict=True))[-count:]
        means.append(-sum(seen[token] for seen, token in judged) / count)
        greedy = greedy and all(max(seen, key=lambda token_id: seen[token_id]) == token for seen, token in judged)
    return greedy if item["label"] is None else means.index(min(means)) == item["label"]


def likeliest(model: GPT, ids: list[int], more: int) -> list[int]:
    for _ in range(more):
        seen = log_probabilities(model, [*ids, 0])[-1]
        ids = [*ids, max(seen, key=lambda token: seen[token])]
    return ids


@pytest.fixture(scope="module")
def tasks(model: GPT) -> dict[str, list[dict[str, Any]]]:
    """Return items of three kinds: choices after a shared text, texts before a shared end, and texts to continue.

    Some are longer than the model's context.
    """
    draw = random.Random(5)

    def ids(most: int) -> list[int]:
        return [draw.randrange(50) for _ in range(draw.randint(1, most))]

    choices: list[dict[str, Any]] = []
    for _ in range(13):
        rows = [ids(5) for _ in range(4)]
        counts = [len(row) for row in rows]
        choices.append({"prefix": ids(14), "rows": rows, "asked": counts, "label": draw.randrange(4)})
    schema = []
    for _ in range(6):
        end = ids(4)
        rows = [[*ids(7), *end] for _ in range(2)]
        schema.append({"prefix": [], "rows": rows, "asked": [len(end)] * 2, "label": draw.randrange(2)})
    texts = []
    for number in range(9):
        before = ids(6)
        row = likeliest(model, before, 2) if number % 3 else [*before, *ids(3)]
        texts.append({"prefix": [], "rows": [row], "asked": [len(row) - len(before)], "label": None})
    return {"choices": choices, "schema": schema, "texts": texts}


BASELINES = {"choices": 25.0, "schema": 50.0, "texts": 0.0}


def written(folder: Path, tasks: dict[str, list[dict[str, Any]]], head: dict[str, Any] | None = None) -> Path:
    listed = [{"label": name, "random_baseline": BASELINES[name], "items": len(some)} for name, some in tasks.items()]
    lines = [
        {"v": 1, "bundle_sha256": "ab" * 32, "tasks": listed, **(head or {})},
        *(item for some in tasks.values() for item in some),
    ]
    (folder / FILE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder / FILE


def scored(model: GPT, file: Path, at_once: int = 8, processes: Processes | None = None) -> dict[str, Any]:
    found = core_score(model, file, at_once, device=CPU, processes=processes or Processes(), stopping=lambda: False)
    assert found is not None
    return as_record(*found)


@pytest.mark.parametrize("at_once", [1, 8, 1000])
def test_core_is_what_the_plain_way_of_computing_it_gives(
    model: GPT, tasks: dict[str, list[dict[str, Any]]], tmp_path: Path, at_once: int
) -> None:
    found = scored(model, written(tmp_path, tasks), at_once)
    centered = []
    for name, items in tasks.items():
        right = sum(by_hand(model, item) for item in items) / len(items)
        assert 0 < right < 1, "made so that some are right and some are not"
        assert found["tasks"][name]["accuracy"] == pytest.approx(right, abs=1e-12)
        chance = BASELINES[name] / 100
        centered.append((right - chance) / (1 - chance))
        assert found["tasks"][name]["centered"] == pytest.approx(centered[-1], abs=1e-12)
    assert found["core"] == pytest.approx(sum(centered) / 3, abs=1e-12)
    assert (found["core_items"], found["bundle_sha256"]) == (28, "ab" * 32)


def test_several_processes_share_the_items(model: GPT, tasks: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    file = written(tmp_path, tasks)
    whole = scored(model, file)["tasks"]
    shares = [scored(model, file, 8, Processes(rank, rank, 3, 3))["tasks"] for rank in range(3)]
    for name in tasks:
        assert sum(share[name]["accuracy"] for share in shares) == pytest.approx(whole[name]["accuracy"])


def test_nothing_is_told_of_a_score_that_was_stopped(
    model: GPT, tasks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    stops = iter([False, True])
    found = core_score(
        model, written(tmp_path, tasks), 8, device=CPU, processes=Processes(), stopping=lambda: next(stops)
    )
    assert found is None


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"asked": [0]}, "token before"),
        ({"asked": [3]}, "token before"),
        ({"rows": [[50]]}, "token ids"),
        ({"rows": [["a"]]}, "token ids"),
        ({"label": 1}, "label"),
        ({"rows": [], "asked": []}, "token before"),
    ],
)
def test_an_item_that_cannot_be_is_refused(model: GPT, tmp_path: Path, item: dict[str, Any], name: str) -> None:
    whole = {"prefix": [1], "rows": [[2, 3]], "asked": [1], "label": 0}
    with pytest.raises(Refused, match=name):
        scored(model, written(tmp_path, {"choices": [{**whole, **item}]}))


def test_a_file_that_ends_early_or_has_no_tasks_is_refused(model: GPT, tmp_path: Path) -> None:
    item = {"prefix": [1], "rows": [[2, 3]], "asked": [1], "label": 0}
    task = {"label": "choices", "random_baseline": 25.0, "items": 2}
    for head, name in (({"tasks": [task]}, "choices"), ({"tasks": []}, "tasks")):
        with pytest.raises(Refused, match=name):
            scored(model, written(tmp_path, {"choices": [item]}, head))
    (tmp_path / FILE).write_text("[]\n")
    with pytest.raises(Refused, match="its tasks"):
        scored(model, tmp_path / FILE)


def test_a_run_without_its_items_ends_before_its_first_step(tmp_path: Path, train: Train) -> None:
    folder = write_data(tmp_path / "data")
    assert train(recipe_record(eval={"core": 5}), tmp_path / "out", folder) == 2
    assert "core.jsonl" in events(tmp_path / "out")[-1]["message"]
    assert not events(tmp_path / "out", "step")


def test_a_run_whose_score_is_stopped_is_done_and_warns(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_data(tmp_path / "data")
    item = {"prefix": [1], "rows": [[2, 3], [4]], "asked": [1, 1], "label": 0}
    written(folder, {"choices": [item] * 3})
    recipe = recipe_record(train={"steps": 2, "checkpoint_every": 2}, eval={"core": 3, "every": 2})
    assert train(recipe, tmp_path / "out", folder) == 0
    (scored,) = events(tmp_path / "out", "core")
    assert (scored["core_items"], scored["step"]) == (3, 2)

    monkeypatch.setattr("trainer.core_score.core_score", lambda *_, **__: None)
    assert train(recipe, tmp_path / "other", folder) == 0
    assert [event["code"] for event in events(tmp_path / "other", "warning")][-1] == "core.stopped"
    assert events(tmp_path / "other", "stop")[-1]["reason"] == "done"
    assert not events(tmp_path / "other", "core")
