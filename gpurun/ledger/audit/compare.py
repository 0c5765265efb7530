"""Compares two statements key by key, and leaves out their words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from gpurun.core.receipt_rules import WORDS

Keys = Literal["all", "expected", "common"]


def find_differences(expected: Any, found: Any, path: str, *, keys: Keys = "all") -> Iterator[str]:
    """Yield the paths at which two pieces of JSON differ; a number of another type (1 and 1.0, 1 and true) differs too.

    `path` is where both stand in a statement, "" for the whole. Words for people are not compared, and of a dictionary
    only these keys: all of both, those that are `expected`, or those that both have.
    """
    if re.sub(r"\[\d+\]", "[]", path) in WORDS:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        wanted = {"all": expected.keys() | found.keys(), "expected": expected.keys()}
        for key in sorted(wanted.get(keys, expected.keys() & found.keys())):
            below = f"{path}.{key}" if path else str(key)
            yield from find_differences(expected.get(key, _ABSENT), found.get(key, _ABSENT), below, keys=keys)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from find_differences(one, other, f"{path}[{place}]", keys=keys)
    elif type(expected) is not type(found) or expected != found:
        yield path or "the statement"


class _Absent:
    """What stands for a key that one side does not have: like nothing that JSON can hold."""


_ABSENT = _Absent()
