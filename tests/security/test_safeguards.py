"""The list of safeguards that `make mutants` takes away one by one is whole and up to date; nothing is run here."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.simulation.mutants import missed_by
from tests.simulation.safeguards import ROOT, Safeguard, safeguards


@pytest.fixture(scope="module")
def found() -> list[Safeguard]:
    """The whole list; making it reads every module of gpurun."""
    return list(safeguards())


def test_every_safeguard_exists_and_the_source_without_it_parses(found: list[Safeguard]) -> None:
    """Words that were changed are a LookupError that says which: then the list has to be mended."""
    for guard in found:
        assert guard.mutant != (ROOT / guard.path).read_text(encoding="utf-8"), guard.name
        ast.parse(guard.mutant)
        assert missed_by(guard.path), guard.name
    kinds = Counter(guard.kind for guard in found)
    assert set(kinds) == {"sync", "lock", "digest", "read-back"}
    assert len({guard.name for guard in found}) == len(found)


def test_what_is_found_by_its_form_is_all_that_there_is(found: list[Safeguard]) -> None:
    """Counted in another way: as text. A sync or a lock in a form that is not recognised would be on no list."""
    counted = Counter(guard.path for guard in found if guard.kind in ("sync", "lock"))
    for path in sorted((ROOT / "gpurun").rglob("*.py")):
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        calls = text.count("fsync_file(") - text.count("def fsync_file(") + text.count("fcntl.flock(")
        assert counted[place] >= calls, place
