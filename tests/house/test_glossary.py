"""Tests that docs/dev/GLOSSARY.md gives each word one meaning, and that no module has a retired name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePath

from house_sources import ROOT, Source, sources

PAGE = (ROOT / "docs" / "dev" / "GLOSSARY.md").read_text(encoding="utf-8")
RETIRED = set(re.findall(r"`(\w+)`", PAGE.rpartition("Words that no module is named with")[2]))


def rows() -> list[list[str]]:
    """Return the table's rows without its head: word, meaning, place."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def modules() -> list[Source]:
    return [source for source in sources("gpurun") if not source.path.endswith("__.py")]


def test_a_word_stands_once_with_its_meaning() -> None:
    assert {"settle", "rate", "answers"} <= RETIRED
    assert all(len(row) == 3 and all(row) for row in rows())
    assert [word for word, count in Counter(word.lower() for word, *_ in rows()).items() if count > 1] == []


def test_where_a_word_stands_there_is_something() -> None:
    gone = [f"{word}: {place}" for word, _, place in rows() if not (ROOT / place.strip("`")).exists()]
    assert not gone, "\n".join(gone)


def test_no_module_is_named_with_a_retired_word() -> None:
    named = [s.path for s in modules() if PurePath(s.path).stem in RETIRED]
    assert not named, "\n".join(named)
