"""The pages build as a site: each link leads somewhere, and each page is in the menu."""

from __future__ import annotations

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
