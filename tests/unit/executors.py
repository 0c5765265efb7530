"""Helpers of test_executors.py and other tests: orders to prepare a corpus, and datatrove's steps for such orders."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from gpurun.data.datatrove_steps import Doing, TaskReader
from gpurun.data.layout import AS_FOUND
from gpurun.data.prepare import BegunPreparation, PrepareOrder, begin_preparing

WORDS = [f"word{number}" for number in range(2000)]


def order(corpus: Path, out: Path, **choices: Any) -> PrepareOrder:
    """Return an order to prepare the corpus as GPT-2 tokens, in shards of 20,000."""
    return PrepareOrder(str(corpus), "gpt2", out, shard_tokens=20_000, **choices)


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def begun_of(wanted: PrepareOrder) -> BegunPreparation:
    begun = begin_preparing(wanted, print)
    assert isinstance(begun, BegunPreparation)
    return begun


def steps(begun: BegunPreparation, *between: Any) -> list[Any]:
    return [TaskReader(begun.left, AS_FOUND), *between, Doing(begun.writer, begun.left)]
