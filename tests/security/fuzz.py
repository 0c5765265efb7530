"""Ways to break bytes and JSON, and a check of a verb that reads them, for test_fuzz.py and other tests."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from tests.command_line import gpurun
from tests.memory import forget_own_peak, own_growth_bytes

FEW, MANY = 80, 3_000


MOST_S, MOST_BYTES = 10.0, 1 << 30


many = pytest.mark.parametrize("many", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])


NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, 1 << 64, 10**400, "", "x" * 5000, "\ud800", "\x1b[2J\x07\u202e", "../../etc", [], {},
    [[[]]], {"a": {"b": {}}}, [None], ["x"] * 100, "NaN", "1970-01-01T00:00:00Z",
    json.loads("[" * 90 + "]" * 90),
)  # fmt: skip


WORDS = (
    b"NaN", b"-Infinity", b"1e999", b"[" * 5000, b'{"a":' * 5000, b"\0", b"\xff\xfe", b"\n", b'"', b"9" * 5000,
    b"[0," * 100_000, b" " * (1 << 20),
)  # fmt: skip


def torn(content: bytes, by: random.Random) -> bytes:
    """Return the bytes with one random change: a replaced byte, a gap, a repeat, a cut end or a strange word."""
    at, length = by.randrange(len(content) + 1), by.choice([1, 2, 7, 60])
    return by.choice(
        [
            content[:at] + bytes([by.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at + length :],
            content[: at + length] + content[at:],
            content[:at],
            content[:at] + by.choice(WORDS) + content[at:],
        ]
    )


def altered(value: Any, by: random.Random) -> Any:
    """Return a copy of the JSON value in which one value, at any depth, is removed or replaced."""
    if isinstance(value, dict | list) and value and by.random() < 0.9:
        key = by.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed: Any = value.copy()
        if by.random() < 0.15:
            del changed[key]
        else:
            changed[key] = altered(value[key], by)
        return changed
    return by.choice(NASTY)


def plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def check(*words: str, what: object = "") -> str:
    """Run a verb as a user does, and return its output.

    Assert that its exit code is documented and not a bug's, and that it stays within MOST_S and MOST_BYTES.
    """
    began = time.process_time()
    forget_own_peak()
    done = gpurun(*words)
    said = done.stdout + done.stderr
    assert "[bug]" not in said, (words, what, said)
    assert "Traceback" not in said, (words, what, said)
    assert done.returncode in {*map(int, ExitCode)} - {int(ExitCode.BUG)}, (words, what, done.returncode, said)
    assert time.process_time() - began < MOST_S, (words, what)
    assert own_growth_bytes() < MOST_BYTES, (words, what)
    return said
