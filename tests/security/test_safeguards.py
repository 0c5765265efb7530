"""Tests that the list of safeguards that `make mutants` removes one by one is complete; no mutant runs here."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.simulation.mutants import missed_by
from tests.simulation.safeguards import ROOT, Safeguard, safeguards


@pytest.fixture(scope="module")
def found() -> list[Safeguard]:
    """Return the whole list; made once, because that reads every module of gpurun."""
    return list(safeguards())


def test_every_safeguard_exists_and_the_source_without_it_parses(found: list[Safeguard]) -> None:
    """If a safeguard's source text has changed, a LookupError names the text, and the list must be updated."""
    for guard in found:
        assert guard.mutant != (ROOT / guard.path).read_text(encoding="utf-8"), guard.name
        ast.parse(guard.mutant)
        assert missed_by(guard.path), guard.name
    kinds = Counter(guard.kind for guard in found)
    assert set(kinds) == {"sync", "lock", "digest", "read-back"}
    assert len({guard.name for guard in found}) == len(found)


def test_what_is_found_by_its_form_is_all_that_there_is(found: list[Safeguard]) -> None:
    """The calls are also counted in the source text, because the list would lack a sync or lock of an unknown form."""
    counted = Counter(guard.path for guard in found if guard.kind in ("sync", "lock"))
    for path in sorted((ROOT / "gpurun").rglob("*.py")):
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        calls = text.count("fsync_file(") - text.count("def fsync_file(") + text.count("fcntl.flock(")
        assert counted[place] >= calls, place
