"""Tests that the pages build as a site: each link leads somewhere, and each page is in the menu."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds_without_a_warning() -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs installs it")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "dev" / "site.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "WARNING" in done.stderr + done.stdout) == (0, False), done.stderr
    assert (ROOT / "build" / "site" / "docs" / "RECEIPTS.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("link", "ends"), [("there.md", 0), ("nowhere.md", 1), ("there.md#nowhere", 1)])
def test_a_link_that_leads_nowhere_ends_it(link: str, ends: int, tmp_path: Path) -> None:
    """With mkdocs's own -q no warning was counted, and a dead link passed."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs installs it")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "dev" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(site := importlib.util.module_from_spec(spec))
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# One\n\n[a link]({link})\n")
    (pages / "there.md").write_text("# Two\n")
    config = {
        "site_name": "x",
        "docs_dir": str(pages),
        "site_dir": str(tmp_path / "site"),
        "nav": ["index.md", "there.md"],
    }
    (tmp_path / "mkdocs.yml").write_text(json.dumps(config | {"validation": site.VALIDATION}))
    assert site.built(tmp_path / "mkdocs.yml") == ends
