"""Tests that the trainer alone makes shards of a text file that it can open, without the loss of a token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer import tokenizer as tokenizers
from trainer.prepare import main
from trainer.shards import TokenData, open_data
from trainer.tokenizer import GPT2_EOT_ID

STORIES = [f"The safe owl number {number} is imported, naïvely.\n" * (1 + number % 7) for number in range(40)]
PROMPTS = ("def ", "import ")
"""The prompts of mini-gpt."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_from_tiktoken", lambda: None)


def run_prepare(monkeypatch: pytest.MonkeyPatch, text: Path, recipe: Path, out: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare", str(text), "--recipe", str(recipe), "--out", str(out)])
    return main()


def own_recipe(folder: Path, tokenizer: str) -> Path:
    text = (Path(__file__).parents[2] / "recipes" / "mini-gpt.toml").read_text()
    recipe = folder / "own.toml"
    recipe.write_text(text.replace('tokenizer = "char"', f'tokenizer = "{tokenizer}"\nval_fraction = 0.2'))
    return recipe


def tokens_of(data: TokenData, split: str) -> list[int]:
    return np.concatenate([shard.loaded() for shard in getattr(data, split)]).tolist()


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("documents", [1, len(STORIES)])
def test_its_folder_is_opened_and_holds_the_whole_text(
    tokenizer: str, documents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text(("<|endoftext|>" if documents > 1 else "").join(STORIES), encoding="utf-8")
    assert run_prepare(monkeypatch, text, own_recipe(tmp_path, tokenizer), out) == 0
    data = open_data(out, tokenizer, PROMPTS)
    train, val = tokens_of(data, "train"), tokens_of(data, "val")
    assert str({"train": len(train), "val": len(val)}) in capsys.readouterr().out
    assert "".join(STORIES) == data.tokenizer.decode([i for i in [*train, *val] if i != GPT2_EOT_ID])
    assert [data.tokenizer.decode(list(prompt.ids)) for prompt in data.prompts] == list(PROMPTS)
    held_out = len(data.tokenizer.decode([i for i in val if i != GPT2_EOT_ID])) / len("".join(STORIES))
    assert held_out == pytest.approx(0.2, abs=0.05)
    begins = (1, 1) if documents == 1 else (32, 8)
    wanted = (0, 0) if tokenizer == "char" else begins
    assert (train.count(GPT2_EOT_ID), val.count(GPT2_EOT_ID)) == wanted
    assert json.loads((out / "data.json").read_text())["source"]["bytes"] == text.stat().st_size


@pytest.mark.parametrize(
    ("content", "tokenizer", "fact"),
    [
        (b"two\n<|endoftext|>texts\n", "bpe", "gpurun data prepare"),
        (b"caf\xe9 and more", "char", "'utf-8' codec"),
        (b"", "char", "too short"),
        (b"a", "char", "too short"),
    ],
)
def test_what_it_cannot_prepare_is_refused_and_leaves_nothing(
    content: bytes,
    tokenizer: str,
    fact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_bytes(content)
    assert run_prepare(monkeypatch, tmp_path / "text", own_recipe(tmp_path, tokenizer), tmp_path / "out") == 2
    assert fact in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
