"""Tests that no module has a vague name, and that a recipe fits on a screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from house_sources import ROOT, sources

VAGUE = ("utils", "util", "common", "manager", "helpers", "helper", "misc")


def test_no_vague_name() -> None:
    paths = [source.path for source in sources("gpurun", "trainer")]
    vague = [path for path in paths for part in path.removesuffix(".py").split("/") if part.lstrip("_") in VAGUE]
    assert not vague, "\n".join(vague)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_fits_on_a_screen(recipe: Path) -> None:
    assert len(recipe.read_text().splitlines()) <= 40
