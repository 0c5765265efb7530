"""Tests of the commands in docs/RECEIPTS.md that check a receipt with a public key and without gpurun."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpurun.core.paths import Home
from gpurun.ledger.audit import audit
from gpurun.ledger.signing import PUBLIC_NAME
from tests.unit.ledger_samples import WEIGHTS, finished_run

PAGE = Path(__file__).parents[2] / "docs" / "RECEIPTS.md"
TOOLS = ("sh", "jq", "openssl", "base64", "sha256sum")

pytestmark = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"one of {TOOLS} is not installed")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home").prepare()
    finished_run(home)
    return home


@pytest.fixture
def handed_in(home: Home, tmp_path: Path) -> Path:
    """Return a folder with what a student hands in: the receipt, the public key and the trained files."""
    folder = tmp_path / "handed in"
    folder.mkdir()
    shutil.copy(home.run("fox-41").receipt, folder)
    shutil.copy(home.keys / PUBLIC_NAME, folder)
    shutil.copytree(home.run("fox-41").artifacts, folder / "artifacts")
    return folder


def typed(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run the shell blocks under "By hand" on the page, unchanged and in order; return their results."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text().split("## By hand")[1], re.DOTALL)
    return [
        subprocess.run(["sh", "-c", one], cwd=folder, capture_output=True, text=True, check=False) for one in blocks
    ]


def test_signature_files_and_head_check_with_common_tools(home: Home, handed_in: Path) -> None:
    statement, files = typed(handed_in)
    assert "Signature Verified Successfully" in statement.stdout
    assert '"upper_bound_micros": 2365500' in statement.stdout
    assert f"{WEIGHTS}: OK" in files.stdout
    assert audit(home).head in files.stdout


def test_another_key_and_another_file_are_seen(home: Home, handed_in: Path, tmp_path: Path) -> None:
    (handed_in / "artifacts" / WEIGHTS).write_bytes(b"other weights")
    other = Home(tmp_path / "other").prepare()
    finished_run(other)
    shutil.copy(other.keys / PUBLIC_NAME, handed_in)
    statement, files = typed(handed_in)
    assert "Signature Verified Successfully" not in statement.stdout
    assert f"{WEIGHTS}: FAILED" in files.stdout
