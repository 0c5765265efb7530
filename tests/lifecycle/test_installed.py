"""Tests of gpurun installed from its wheel, without a clone: recipes, trainer, guard and pages are inside."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from gpurun.core.secrets import child_environment

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.process]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python in which gpurun is installed from its wheel, with the dependencies of this test's environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "-q", "--no-input"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("gpurun_cap-*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    # Python ignores the .pth files in a folder that a .pth file names, so the clone's editable install stays out.
    beside = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (beside / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def typed(python: Path, folder: Path, *words: str) -> str:
    environment = child_environment({"HOME": str(folder), "GPURUN_HOME": str(folder / "home")})
    command = [str(python.with_name("gpurun")), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_wheel_plans_trains_and_follows_the_first_tutorial(python: Path, tmp_path: Path) -> None:
    ask = [python, "-c", "import gpurun; print(gpurun.__file__)"]
    where = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "site-packages" in where.stdout, "this is the wheel's"
    assert "$25.00" in typed(python, tmp_path, "plan", "gpt2-124m", "--gpu", "8xA100", "--max-cost", "25")
    assert "closed, exit 0" in typed(python, tmp_path, "train", "--gpu", "8xA100", "--max-cost", "25", "--dry-run")
    assert "Receipts" in typed(python, tmp_path, "help", "receipts")
    (tmp_path / "train.py").write_text("print('step 1/1: loss 1.0'); open('out.txt', 'w').write('x')\n")
    assert "closed, exit 0" in typed(python, tmp_path, "run", "--provider", "local", "--yes", "train.py")
    tutorial = (ROOT / "docs" / "COURSE-LAB.md").read_text()
    page = typed(python, tmp_path, "help", "course-lab")
    assert page.strip() == tutorial.strip(), "the wheel has this page"
    for block in tutorial.split("```sh\n")[1:]:
        for line in block.split("```")[0].splitlines():
            if line.startswith("gpurun "):
                said = typed(python, tmp_path, *shlex.split(line)[1:])
            else:
                subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert "bit-identical" in said
    doctor = json.loads(typed(python, tmp_path, "doctor", "--json"))
    assert doctor["ok"] is True
