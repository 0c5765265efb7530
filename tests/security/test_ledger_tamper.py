"""Tests that the audit notices each changed byte of a finished run: in its files, and in the chain of receipts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from tests.later import SOAK, examples
from tests.unit.ledger_samples import finished_run

_PICK: dict[str, Callable[[Home], Path]] = {
    "journal": lambda home: home.run("owl-07").journal,
    "receipt": lambda home: home.run("owl-07").receipt,
    "ledger": lambda home: home.ledger,
    "log": lambda home: home.run("owl-07").log,
    "events": lambda home: home.run("owl-07").events,
    "plan": lambda home: home.run("owl-07").plan,
    "checkpoint": lambda home: home.run("owl-07").artifacts / "checkpoints" / "000120.model.safetensors",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home with two finished runs; every example restores what it changed."""
    home = Home(tmp_path_factory.mktemp("home"))
    finished_run(home, "fox-41")
    finished_run(home, "owl-07")
    assert audit(home).sound
    return home


def seen_when(home: Home, path: Path, content: bytes) -> bool:
    """Return whether the audit reports a problem while a file has other content; restore the file afterwards."""
    whole = path.read_bytes()
    try:
        path.write_bytes(content)
        return not audit(home).sound
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", list(_PICK))
@settings(max_examples=examples(60), deadline=None)
@given(place=st.integers(0, 1 << 16), change=st.integers(1, 255))
def test_any_byte_of_any_line_that_is_changed_is_reported(home: Home, name: str, place: int, change: int) -> None:
    path = _PICK[name](home)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= change
    assert seen_when(home, path, bytes(content))


@pytest.mark.parametrize("name", list(_PICK))
@settings(max_examples=examples(20), deadline=None)
@given(start=st.integers(0, 1 << 16), length=st.integers(1, 400))
def test_anything_cut_out_is_reported(home: Home, name: str, start: int, length: int) -> None:
    path = _PICK[name](home)
    content = path.read_bytes()
    start %= len(content)
    assert seen_when(home, path, content[:start] + content[start + length :])


@pytest.mark.parametrize("name", ["journal", "ledger"])
def test_every_changed_byte_of_the_last_line_is_noticed(home: Home, name: str) -> None:
    path = _PICK[name](home)
    whole = path.read_bytes()
    unseen = []
    for place in range(len(whole) - 1, whole.rindex(b"\n", 0, -1) - 1, -1 if SOAK else -3):
        content = bytearray(whole)
        content[place] ^= 1 << (place % 8)
        if not seen_when(home, path, bytes(content)):
            unseen.append((place, whole[max(0, place - 20) : place + 20]))
    assert unseen == []
