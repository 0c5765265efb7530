"""Tests that docs/dev/MATRIX.md names a test for every fault, and only tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "dev" / "MATRIX.md").read_text(encoding="utf-8")
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| step", "| promise"))
]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
STEPS = ("plan", "provision", "ship", "run", "collect", "destroy", "receipt", "any")


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Return the names of a file's functions, tests among them; the file is parsed, not run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_every_row_names_tests_that_exist(row: str) -> None:
    named = NAMED.findall(row)
    assert named, "a row without a test promises something that nobody looks at"
    assert (
        row.count("`") == 2 * len(named) + row.count("`doctor") * 2 + row.count("`logs") * 2 + row.count("`reap`") * 2
    )
    for file, test in named:
        assert (TESTS / file).is_file(), file
        assert test in functions_of(TESTS / file), f"{file} has no {test}"


def test_every_step_and_every_promise_has_its_rows() -> None:
    first = [row.split("|")[1].strip() for row in ROWS]
    assert set(STEPS) <= set(first)
    assert [name.split()[0] for name in first if name.startswith("P")] == [f"P{number}" for number in range(1, 11)]
    assert len(ROWS) == len(set(ROWS))
