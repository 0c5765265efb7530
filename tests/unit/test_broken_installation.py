"""Tests that a missing package, or another package named gpurun, is reported as a broken installation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.installed_files import install_line


def without_pydantic(*_: object, **__: object) -> None:
    raise ModuleNotFoundError("No module named 'typing_inspection'")


def test_a_missing_package_is_a_broken_installation_and_no_bug(gpurun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.ledger.runs.planned_runs", without_pydantic)
    code, _, err = gpurun("ps")
    assert (code, "install.incomplete" in err, "typing_inspection" in err) == (4, True, True)


def test_somebody_elses_gpurun_in_the_same_place_is_named(
    gpurun: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = tmp_path / "gpurun-0.1.1.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Name: gpurun\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = gpurun("doctor", "--json")
    hints = [finding["hint"] for finding in json.loads(out)["data"]["findings"]]
    assert (code, any("pip uninstall gpurun" in hint for hint in hints)) == (4, True)
    monkeypatch.setattr("gpurun.ledger.runs.planned_runs", without_pydantic)
    code, _, err = gpurun("ps")
    assert (code, "install.other_gpurun" in err) == (4, True)


def test_an_extra_never_replaces_an_editable_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hint once replaced a clone's editable install by a copy, so that later changes had no effect."""
    root = Path(__file__).parents[2]
    assert install_line("report") == f"pip install -e '{root}[report]'"
    monkeypatch.setattr("gpurun.__file__", str(tmp_path / "site-packages" / "gpurun" / "__init__.py"))
    assert install_line("report") == "pip install 'gpurun-cap[report]'"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "uv-receipt.toml").touch()
    assert install_line("report") == f"uv pip install --python '{sys.executable}' 'gpurun-cap[report]'"
    (tmp_path / "pipx_metadata.json").touch()
    assert install_line("report") == "pipx runpip gpurun-cap install 'gpurun-cap[report]'"
    said = [path.name for path in (root / "gpurun").rglob("*.py") if "pip install '.[" in path.read_text()]
    assert said == []
