"""Tests that the README's pictures of the live view match this code and the records beside them: `make picture`."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drawer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_live", ROOT / "docs" / "dev" / "draw_live.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    return module


def test_each_picture_is_what_this_code_draws(drawer: ModuleType) -> None:
    drawn = drawer.pictures()
    assert {path.name for path in drawn} == {"live.svg", "live-rented.svg", "README.md"}
    assert [path.name for path, content in drawn.items() if path.read_text(encoding="utf-8") != content] == []


def test_a_paid_runs_picture_says_that_its_cloud_was_emulated(drawer: ModuleType) -> None:
    assert "emulated" in drawer.pictures()[ROOT / "docs" / "live-rented.svg"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "emulated" in readme[: readme.index("live-rented.svg")].rpartition("\n\n")[2]
