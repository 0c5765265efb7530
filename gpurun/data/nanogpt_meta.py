"""The characters of nanoGPT's character level, out of its meta.pkl, without ever running a pickle.

A pickle is a program. Of its instructions only those are followed here that make dicts, strings and whole numbers; none
that could import or call anything is known.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.data.refusals import reading

_MOST_BYTES = 1 << 20
_VALUES = ("BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE")


def characters_of(path: Path) -> list[bytes]:
    """The UTF-8 of every token id, in the order of ids; UsageError for what is no such file."""
    with reading(path), open(path, "rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES:,} bytes")
        itos = plain_pickle(raw)["itos"]
        characters = [itos[number] for number in range(len(itos))]
        if not characters or len(set(characters)) != len(itos) or {len(one) for one in characters} != {1}:
            raise ValueError("itos is not one character an id, each another one")
        return [character.encode() for character in characters]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{path} is not the meta.pkl of nanoGPT's character level: {str(error)[:200] or type(error).__name__}."
        raise UsageError("data.bad_meta", what, hint="Make it again with nanoGPT's prepare.py.") from None


def plain_pickle(raw: bytes) -> Any:
    """What a pickle of dicts, strings and whole numbers holds; ValueError or LookupError for any other, and none."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, value, _ in pickletools.genops(raw):
        match opcode.name:
            case "PROTO" | "FRAME":
                continue
            case name if name in _VALUES:
                stack.append(value)
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if opcode.name == "MEMOIZE" else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "SETITEM" | "SETITEMS" as name:
                at = marks.pop() if name == "SETITEMS" else len(stack) - 2
                stack[at - 1].update(_pairs(stack[at:]))
                del stack[at:]
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"it has the instruction {name}")
    raise ValueError("it has no end")


def _pairs(flat: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)
