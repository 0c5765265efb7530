"""Tests that the README's promises for a Mac hold on Linux that imitates one.

A mount namespace (`enter.sh`) hides /proc and /dev/shm, and sets a host name that does not resolve; `ps` is a Mac's. A
module that loads first (`like_a_mac.py`) removes what a Mac's Python lacks. The kernel, the C library and a file system
that distinguishes `a` from `A` remain those of Linux.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
NAMESPACES = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
BOOT = "0DE9BD3F-1F3C-4B5A-9F1E-2B0C6C7A8D11"
TOLD = {
    "sysctl": ("-n kern.bootsessionuuid", BOOT),
    "ioreg": ("-rd1 -c IOPlatformExpertDevice", '      "IOPlatformUUID" = "5F0C1A52-7C5B-5D0E-8C36-0A1B2C3D4E5F"'),
}
GPURUN = str(Path(sys.executable).with_name("gpurun"))
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow


@pytest.fixture
def mac(tmp_path: Path, own_home: Path) -> Run:
    """Return a function that runs a command in the imitation; processes that it leaves running end with it."""
    folder = tmp_path / "mac"
    (folder / "bin").mkdir(parents=True)
    for name, place in (("ps", "bin/ps"), ("like_a_mac.py", "like_a_mac.py")):
        text = (HERE / name).read_text().replace("HIDDEN_FOLDER", str(folder)).replace("PYTHON", sys.executable)
        (folder / place).write_text(text)
    (folder / "like_a_mac.pth").write_text("import like_a_mac\n")
    for program, (words, answer) in TOLD.items():
        (folder / "bin" / program).write_text(f"#!/bin/sh\n[ \"$*\" = '{words}' ] && echo '{answer}'\n")
    for file in (folder / "bin").iterdir():
        file.chmod(0o755)
    environment = {
        "PATH": f"{folder}/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(tmp_path),
        "GPURUN_HOME": str(own_home),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    enter = ["sh", str(HERE / "enter.sh"), str(folder), sysconfig.get_paths()["purelib"]]

    def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command = [shutil.which("unshare") or "unshare", *NAMESPACES, *enter, *argv]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=400)

    return run


def scene(mac: Run, name: str) -> dict[str, object]:
    done = mac([sys.executable, str(HERE / "scenes.py"), name])
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_readmes_first_command_works_and_syncs_its_journal(mac: Run, tmp_path: Path) -> None:
    done = mac([GPURUN, "train", "--gpu", "8xA100", "--max-cost", "25", "--dry-run"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke" in done.stdout
    assert "2 processes" in done.stderr, "they find one another where the machine's name leads nowhere"
    journal = next(Path(tmp_path).rglob("journal.jsonl")).read_text().splitlines()
    assert (tmp_path / "mac" / "full_syncs").read_text().count("\n") >= len(journal)
    assert {json.loads(line)["boot_id"] for line in journal} == {BOOT}


def test_a_view_in_a_terminal_draws_on_while_no_key_is_pressed(mac: Run) -> None:
    seen = scene(mac, "view")
    assert seen["exit"] == 0, seen["drawn"]
    assert "RUNNING" in str(seen["drawn"])


def test_a_run_resumed_after_a_kill_gets_a_receipt_that_holds(mac: Run) -> None:
    seen = scene(mac, "killed")
    assert (seen["driven"], seen["exit"], seen["audit"]) == (None, 0, 0), seen["said"]
