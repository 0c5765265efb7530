"""Tests of the evaluations' figures against a simple computation of the same figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.tiny_training import Train, events, manifest, recipe_record, write_data, write_items
from trainer.distributed import Device, Processes
from trainer.evaluate import accuracy, choose_width, filled_rows, rounds, score_answers, token_bytes, validation
from trainer.items import FILE, Item, read_items
from trainer.model import GPT
from trainer.recipe import ModelConfig

CPU = Device(torch.device("cpu"), "fp32", None)


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(layers=1, heads=2, width=16, context=8, vocab_size=64))


@pytest.mark.parametrize(("items", "each", "count"), [(7, 2, 3), (6, 2, 3), (1, 4, 2), (13, 1, 1), (3, 2, 1)])
def test_every_item_is_in_one_round_and_all_have_as_many(items: int, each: int, count: int) -> None:
    mine = [rounds(items, each, Processes(rank, rank, count, count, several=True)) for rank in range(count)]
    assert len({len(parts) for parts in mine}) == 1
    assert sorted(first + i for parts in mine for first, some in parts for i in range(some)) == list(range(items))
    assert all(0 <= first < items for parts in mine for first, _ in parts)


class Row:
    """A stand-in for a row of tokens that returns windows of known tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def read(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.tokens[first : first + count]
        return rows[:, :-1], rows[:, 1:]


def test_bits_per_byte_counts_no_byte_for_the_end_of_text(model: GPT) -> None:
    tokens = tuple(b"x" * (1 + i % 5) for i in range(64))
    lengths = token_bytes(tokens, 3)
    assert (lengths[3], lengths[4]) == (0, 5)
    row = Row(torch.randint(0, 64, (5, 9), generator=torch.Generator().manual_seed(1)))
    found = validation(
        model, row, 5, 2, lengths=lengths, device=CPU, processes=Processes(), stopping=lambda: False,  # type: ignore[arg-type]
    )  # fmt: skip
    assert found is not None
    targets = row.tokens[:, 1:]
    size = sum(len(tokens[i]) for i in targets.flatten().tolist() if i != 3)
    with torch.no_grad():
        nats = float(model.eval()(row.tokens[:, :-1], targets)) * targets.numel()
    assert found.val_loss == pytest.approx(nats / 40, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / 40), rel=1e-6)
    none = validation(
        model, row, 5, 2, lengths=np.zeros(64, dtype=np.int64), device=CPU, processes=Processes(),  # type: ignore[arg-type]
        stopping=lambda: False,
    )  # fmt: skip
    assert none is not None
    assert none.bits_per_byte is None


def test_an_ending_is_judged_by_its_mean_loss_after_its_context(model: GPT) -> None:
    draw = torch.Generator().manual_seed(2)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 64, (count,), generator=draw).tolist())

    # Contexts that fit, contexts that do not, and endings that alone are longer than the model's context.
    items = [Item(ids(n), tuple(ids(m) for m in (1, 3, 5, 2 + n)), n % 4) for n in range(1, 12)]
    right = 0
    for item in items:
        scores = []
        for ending in item.endings:
            row = torch.tensor((item.context + ending)[-9:])
            targets = row[1:].clone()
            targets[: max(0, len(targets) - len(ending))] = -100
            with torch.no_grad():
                scores.append(float(model.eval()(row[None, :-1], targets[None])))
        right += scores.index(min(scores)) == item.label
    found = accuracy(model, items, device=CPU, processes=Processes(), stopping=lambda: False)
    assert found == pytest.approx(right / len(items))
    assert accuracy(model, items, device=CPU, processes=Processes(), stopping=lambda: True) is None


def test_padding_to_few_widths_on_a_card_changes_nothing() -> None:
    assert {choose_width(longest, 1024, "cuda") for longest in range(1, 1025)} == set(range(64, 1025, 64))
    assert (choose_width(90, 100, "cuda"), choose_width(90, 100, "cpu")) == (100, 90)
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=2, heads=2, width=16, context=128, vocab_size=64)).eval()
    items = [Item(tuple(range(1, 9)), ((1, 2), (3, 4), (5,), (6, 7, 8)), 1), Item((5,) * 70, ((9,),) * 4, 0)]
    pairs = [(item.context, ending) for item in items for ending in item.endings]
    as_it_is, filled = (filled_rows(pairs, 128, kind) for kind in ("cpu", "cuda"))
    assert (as_it_is[0].shape[1], filled[0].shape[1]) == (70, 128)
    with torch.no_grad():
        torch.testing.assert_close(score_answers(model, *filled), score_answers(model, *as_it_is))


def test_a_run_answers_the_items_and_learns_to(tmp_path: Path, train: Train) -> None:
    folder = write_data(tmp_path / "data")
    write_items(folder)
    recipe = recipe_record(train={"steps": 60, "checkpoint_every": 60}, eval={"every": 60, "hellaswag_items": 20})
    assert train(recipe, tmp_path / "out", folder) == 0
    (found,) = events(tmp_path / "out", "eval")
    assert found["hellaswag_items"] == 11
    assert found["hellaswag"] > 0.6
    assert found["bits_per_byte"] == pytest.approx(found["val_loss"] / math.log(2)), "every character is one byte"
    (warning,) = events(tmp_path / "out", "warning")
    assert warning["code"] == "eval.fewer_items"
    assert f"hellaswag {found['hellaswag']:.4f}" in (tmp_path / "out" / "trainer.log").read_text()


def test_a_stop_among_the_items_leaves_the_loss_that_was_found(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_data(tmp_path / "data")
    write_items(folder)
    monkeypatch.setattr("trainer.train.accuracy", lambda *_, **__: None)
    assert train(recipe_record(eval={"hellaswag_items": 11}), tmp_path / "out", folder) == 0
    assert events(tmp_path / "out")[-1]["reason"] == "signal"
    (found,) = events(tmp_path / "out", "eval")
    assert (found["step"], found["hellaswag"], found["hellaswag_items"]) == (10, None, 0)
    assert manifest(tmp_path / "out")["best"] == {"step": 10, "val_loss": found["val_loss"]}


GOOD = {"context": [1], "endings": [[1], [2], [3], [4]], "label": 0}


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("{", "line 2 of hellaswag.jsonl"),
        (json.dumps(GOOD | {"label": 4}), "line 2 .* label "),
        (json.dumps(GOOD | {"endings": [[1]]}), "line 2 .* four endings"),
        (json.dumps(GOOD | {"context": [28]}), "line 2 .* token ids"),
        (json.dumps(GOOD | {"endings": [[1], [2], [3], []]}), "line 2 .* token ids"),
        (json.dumps({"context": [1]}), "line 2 .* 'endings'"),
        ("[" * 100_000, "line 2"),
        (None, "hellaswag_items is 5.* hellaswag.jsonl"),
        ("", "line 2"),
    ],
)
def test_items_that_are_none_are_refused_by_their_line(
    tmp_path: Path, train: Train, line: str | None, facts: str
) -> None:
    folder = write_data(tmp_path / "data")
    if line is not None:
        (folder / FILE).write_text(json.dumps(GOOD) + "\n" + line + "\n")
    assert train(recipe_record(eval={"hellaswag_items": 5}), tmp_path / "out", folder) == 2
    assert re.search(facts, events(tmp_path / "out")[-1]["message"])
    assert read_items(folder, 0, 28) == ()
