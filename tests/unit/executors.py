"""What test_executors.py and other tests share."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gpurun.data.datatrove_steps import Doing, TaskReader
from gpurun.data.layout import AS_FOUND
from gpurun.data.prepare import Begun, Order, begin

WORDS = [f"word{number}" for number in range(2000)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four files of rows, some rows twice."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        with open(folder / f"{number}.jsonl", "w") as file:
            for seed in range(number * 40, number * 40 + 50):
                text = " ".join(random.Random(seed).choices(WORDS, k=200))
                file.write(json.dumps({"text": text, "url": f"https://example.org/{seed}"}) + "\n")
    return folder


def order(corpus: Path, out: Path, **choices: Any) -> Order:
    """The corpus in five parts."""
    return Order(str(corpus), "gpt2", out, shard_tokens=20_000, **choices)


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def begun_of(wanted: Order) -> Begun:
    begun = begin(wanted, print)
    assert isinstance(begun, Begun)
    return begun


def steps(begun: Begun, *between: Any) -> list[Any]:
    return [TaskReader(begun.left, AS_FOUND), *between, Doing(begun.writer, begun.left)]
