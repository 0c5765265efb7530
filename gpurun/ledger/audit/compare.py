"""Compares two statements key by key, without their sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from gpurun.core.receipt_rules import WORDS

Keys = Literal["all", "expected", "common"]


def find_differences(expected: Any, found: Any, path: str, *, keys: Keys = "all") -> Iterator[str]:
    """Yield the paths at which two JSON values differ; values of two types (1 and 1.0, 1 and true) differ, too.

    `path` is where the values are in a statement, "" for the whole statement. Sentences for people are not compared.
    `keys` says which keys of a dictionary are compared: all, those of `expected`, or those in common.
    """
    if re.sub(r"\[\d+\]", "[]", path) in WORDS:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        selected = {"all": expected.keys() | found.keys(), "expected": expected.keys()}
        for key in sorted(selected.get(keys, expected.keys() & found.keys())):
            below = f"{path}.{key}" if path else str(key)
            yield from find_differences(expected.get(key, _ABSENT), found.get(key, _ABSENT), below, keys=keys)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from find_differences(one, other, f"{path}[{place}]", keys=keys)
    elif type(expected) is not type(found) or expected != found:
        yield path or "the statement"


class _Absent:
    """The value of a key that is missing in one of two dictionaries; it is not equal to any JSON value."""


_ABSENT = _Absent()
