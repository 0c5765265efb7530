"""A decoded JSON record becomes a dataclass, or a refusal that names the first key that is wrong."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from trainer.errors import Refused

__all__ = ["check", "read_table"]


def check(holds: bool, sentence: str) -> None:
    """Raise Refused with the sentence where something does not hold."""
    if not holds:
        raise Refused(sentence)


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _value(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`, or refuse; an integer serves as a number, but true is not 1 and NaN is nothing."""
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return read_table(kind, value, where)
    if kind == tuple[str, ...]:
        check(isinstance(value, list) and all(isinstance(v, str) for v in value), f"{where} must be a list of strings")
        return tuple(value)
    if kind == Mapping[str, Any]:
        check(isinstance(value, dict), f"{where} must be a table")
        return value
    if kind is float and type(value) in (int, float):
        check(math.isfinite(value), f"{where} is {value}; it must be a finite number")
        return float(value)
    check(type(value) is kind, f"{where} is {json.dumps(value)}; it must be {_NAMES[kind]}")
    return value


def read_table(cls: type, table: Any, where: str) -> Any:
    """Build one dataclass from one table; every key must be known and present."""
    check(isinstance(table, dict), f"{where or 'the recipe'} must be a table")
    kinds, dot = get_type_hints(cls), f"{where}." if where else ""
    for key in table:
        near = difflib.get_close_matches(key, kinds, n=1)
        check(key in kinds, f"unknown key {dot}{key}" + (f"; did you mean {dot}{near[0]}?" if near else ""))
    # Only the overlays of a rehearsal may be absent: an overlay that replaces nothing says nothing.
    optional = {f.name for f in fields(cls) if f.default_factory is not MISSING}
    missing = [key for key in kinds if key not in table and key not in optional]
    check(not missing, f"missing key {dot}{missing[0]}" if missing else "")
    return cls(**{key: _value(kinds[key], table[key], dot + key) for key in table})
