"""Tests that every link in the documentation, and every page that code or a message names, leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from house_sources import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NAMED = re.compile(r"\bdocs/[\w./-]*\w\.(?:md|py|svg)\b")
_PAGE = re.compile(r"\bpage\([\"']([\w-]+\.md)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_page_that_code_or_a_message_names_is_there() -> None:
    folders = (ROOT / name for name in ("gpurun", "trainer", "recipes", "tests", "docs"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    named = {
        (str(file.relative_to(ROOT)), name)
        for file in [*files, *ROOT.glob("*.md"), ROOT / "Makefile"]
        for text in [file.read_text(encoding="utf-8")]
        for name in [*_NAMED.findall(text), *(f"docs/{page}" for page in _PAGE.findall(text))]
    }
    assert sorted(pair for pair in named if not (ROOT / pair[1]).exists()) == []


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in _LINK.findall(index)}
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "dev").glob("*.md")]
    assert [page.name for page in pages if page.resolve() not in linked and page.name != "README.md"] == []
