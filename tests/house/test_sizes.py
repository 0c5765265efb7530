"""A module is at most 400 lines, a function 60, a recipe 40; a module is named for what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house_sources import ROOT, sources

VAGUE = ("utils", "util", "common", "manager", "helpers", "helper", "misc")


def test_no_module_over_400_lines() -> None:
    sizes = ((source.path, len(source.text.splitlines())) for source in sources("gpurun", "trainer"))
    long = [f"{path} has {size} lines" for path, size in sizes if size > 400]
    assert not long, "\n".join(long)


def test_no_function_over_60_lines() -> None:
    long = [
        f"{source.at(node)} {node.name} has {size} lines"
        for source in sources("gpurun", "trainer")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (size := (node.end_lineno or 0) - node.lineno + 1) > 60
    ]
    assert not long, "\n".join(long)


def test_no_vague_name() -> None:
    paths = [source.path for source in sources("gpurun", "trainer")]
    vague = [path for path in paths for part in path.removesuffix(".py").split("/") if part.lstrip("_") in VAGUE]
    assert not vague, "\n".join(vague)


def test_rules_are_small_too() -> None:
    assert [s.path for s in sources("tests/house") if len(s.text.splitlines()) > 60] == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_fits_on_a_screen(recipe: Path) -> None:
    assert len(recipe.read_text().splitlines()) <= 40
