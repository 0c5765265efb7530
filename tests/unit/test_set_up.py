"""Tests of `make demo` and `make test` on an incomplete computer: they name what is missing and how to install it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.refusals import lacking

VENV = Path(__file__).parents[2] / ".ci" / "venv.py"
Version = namedtuple("Version", "major minor")
DEBIAN, FEDORA, MAC = 'NAME="Ubuntu"\nID_LIKE=debian\n', 'ID=rocky\nID_LIKE="rhel centos fedora"\n', None


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that returns the message with which the set-up refuses a system without these programs."""
    spec = importlib.util.spec_from_file_location("set_up", VENV)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def of(system: str | None, demo: bool, *lacks: str, python: tuple[int, int] = (3, 12)) -> str:
        release = tmp_path / "os-release"
        if system is not None:
            release.write_text(system)
        monkeypatch.setattr(sys, "platform", "darwin" if system is MAC else "linux")
        monkeypatch.setattr(module, "OS_RELEASE", release)
        monkeypatch.setattr(sys, "version_info", Version(*python))
        monkeypatch.setattr(sys, "version", "{}.{}.6 (main)".format(*python))
        monkeypatch.setattr(module.shutil, "which", lambda name: None if name in lacks else f"/usr/bin/{name}")
        find = importlib.util.find_spec
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name in lacks else find(name))
        with pytest.raises(SystemExit) as stopped:
            module.check_machine(demo)
        return str(stopped.value)

    return of


NEWER = ("python3.14", "python3.13", "python3.12", "python3.11")
APT = "sudo apt install git && sudo apt install g++, then: make test"
CASES = [
    (DEBIAN, True, ["ensurepip"], "✗ python3-venv missing here.\n  sudo apt install python3-venv, then: make demo"),
    (DEBIAN, False, ["git", "c++"], f"✗ git and c++ missing here.\n  {APT}"),
    (FEDORA, False, ["c++"], "✗ c++ missing here.\n  sudo dnf install gcc-c++, then: make test"),
    (MAC, False, ["git", "c++"], "✗ git and c++ missing here.\n  xcode-select --install, then: make test"),
    ("ID=arch\n", False, ["git"], "✗ git missing here.\n  Install git, then: make test"),
]


@pytest.mark.parametrize(("system", "demo", "lacks", "expected"), CASES)
def test_what_is_missing_is_named_with_what_brings_it(
    system: str | None, demo: bool, lacks: list[str], expected: str, refusal: Callable[..., str]
) -> None:
    assert refusal(system, demo, *lacks) == expected


@pytest.mark.parametrize(
    ("system", "lacks", "does"),
    [
        (MAC, NEWER, "brew install python@3.12, then: make demo PYTHON=python3.12"),
        (FEDORA, NEWER, "sudo dnf install python3.12, then: make demo PYTHON=python3.12"),
        (MAC, NEWER[:2], "make demo PYTHON=python3.12"),
    ],
)
def test_the_macs_own_python_is_too_old_and_a_newer_is_named(
    system: str | None, lacks: tuple[str, ...], does: str, refusal: Callable[..., str]
) -> None:
    assert refusal(system, True, *lacks, python=(3, 9)) == f"✗ gpurun needs Python 3.11; this is 3.9.6.\n  {does}"


def test_an_intel_mac_hears_what_works_without_pytorch(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert ".venv/bin/pip install ." in refusal(MAC, True)


def test_native_windows_hears_of_wsl2_in_one_sentence() -> None:
    """gpurun must check for Windows before it imports modules that Windows lacks."""
    code = (
        "import signal, sys; sys.platform = 'win32'; sys.modules['fcntl'] = sys.modules['termios'] = None\n"
        "del signal.pthread_sigmask\n"
        "from gpurun.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("✗ ")
    assert lacking(done.stderr, "Windows", "WSL2") == []
    assert done.stderr.count("\n") == 1
