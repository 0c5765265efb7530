"""Reads HellaSwag's items from the data folder. No torch: gpurun also reads them locally, before anything is rented.

`hellaswag.jsonl` has one item per line: {"context": [ids], "endings": [[ids], [ids], [ids], [ids]], "label": 0..3}.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import Refused

__all__ = ["FILE", "Item", "read_items"]

FILE = "hellaswag.jsonl"


@dataclass(frozen=True)
class Item:
    """A context and four endings, as token ids; `label` is the index of the right ending."""

    context: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]
    label: int


def _ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not value or not all(type(i) is int and 0 <= i < vocab_size for i in value):
        raise ValueError("it must have token ids of this vocabulary")
    return tuple(value)


def _item(line: str, vocab_size: int) -> Item:
    record = json.loads(line)
    endings = tuple(_ids(ending, vocab_size) for ending in record["endings"])
    if len(endings) != 4 or type(record["label"]) is not int or not 0 <= record["label"] < 4:
        raise ValueError("it must have four endings and a label of 0 to 3")
    return Item(_ids(record["context"], vocab_size), endings, record["label"])


def read_items(folder: Path, most: int, vocab_size: int) -> tuple[Item, ...]:
    """Return the first `most` items; with 0, return none and need no file. Refused if a line is not an item."""
    if not most:
        return ()
    items = []
    try:
        with (folder / FILE).open(encoding="utf-8") as lines:
            for number, line in enumerate(itertools.islice(lines, most), 1):
                try:
                    items.append(_item(line, vocab_size))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise Refused(f"line {number} of {FILE} is not an item: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"eval.hellaswag_items is {most}, but {FILE} in the data folder cannot be read") from error
    if not items:
        raise Refused(f"eval.hellaswag_items is {most}, but {FILE} is empty")
    return tuple(items)
