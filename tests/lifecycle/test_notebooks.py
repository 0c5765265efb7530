"""Tests of notebooks as their platforms run them, with the real trainer on this CPU, and of importing their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.core.paths import Home
from tests.command_line import gpurun

TINY = ("train.steps=20", "train.checkpoint_every=10", "eval.every=10", "model.layers=1", "train.compile=false")
LONG_S = 300


def written(folder: Path, platform: str, *more: str) -> Path:
    """Write the notebook of a tiny lab for this platform, and return its path."""
    (folder / "text.txt").write_text("".join(f"{number} bottles of milk\n" for number in range(60)))
    flags = [word for setting in TINY for word in ("--set", setting)]
    path = folder / f"{platform}.ipynb"
    done = gpurun(
        "notebook", "course-lab", "--for", platform, "--data", str(folder / "text.txt"), "-o", str(path), *flags, *more
    )
    assert done.returncode == 0, done.stderr
    return path


def imported(folder: Path, name: str, *words: str) -> None:
    """Import the notebook's evidence as a run; assert that its receipt is good and that `audit --strict` passes."""
    done = gpurun("import", str(folder / "evidence.zip"), "--name", name)
    assert done.returncode == 0, done.stderr
    receipt = json.loads(gpurun("receipt", name, "--json").stdout)["data"]["statement"]["predicate"]
    assert receipt["verdict"]["is"] == "smoke"
    assert receipt["training"]["outcome"] == "done"
    assert receipt["checkpoint"]["latest"] == 20
    audited = gpurun("audit", "--strict", *words)
    assert audited.returncode == 0, audited.stdout


@pytest.mark.torch
@pytest.mark.process
def test_notebook_cells_run_in_plain_python_and_import_as_a_run(tmp_path: Path) -> None:
    notebook = json.loads(written(tmp_path, "colab").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join(cells[:-1]))  # The last cell offers a download, which needs a kernel.
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, capture_output=True, timeout=LONG_S)
    imported(tmp_path, "fox-41")


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("https://github.com/ada/labs/blob/main/w1/lab.ipynb", "github/ada/labs/blob/main/w1/lab.ipynb"),
        ("https://gist.github.com/ada/0a1b2c", "gist/ada/0a1b2c"),
    ],
)
def test_a_notebook_with_an_address_has_a_badge_for_colab(tmp_path: Path, url: str, opened: str) -> None:
    notebook = json.loads(written(tmp_path, "colab", "--url", url).read_text())
    first = "".join(notebook["cells"][0]["source"]).splitlines()
    site = "https://colab.research.google.com"
    assert first[0] == f"[![Open in Colab]({site}/assets/colab-badge.svg)]({site}/{opened})"
    assert first[2].startswith("# course-lab, trained by")
    assert "badge" not in written(tmp_path, "colab").read_text(), "no address is known"


@pytest.mark.parametrize(
    ("platform", "url", "code"),
    [
        ("kaggle", "https://github.com/ada/labs/blob/main/lab.ipynb", "notebook.badge"),
        ("colab", "https://example.com/lab.ipynb", "notebook.url"),
        ("colab", "https://github.com/ada/labs/blob/main/lab.ipynb)](https://evil.example", "notebook.url"),
    ],
)
def test_a_badge_that_colab_could_not_open_is_refused(platform: str, url: str, code: str, tmp_path: Path) -> None:
    done = gpurun("notebook", "course-lab", "--for", platform, "--url", url, "-o", str(tmp_path / "x.ipynb"))
    assert (done.returncode, f"[{code}]" in done.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_a_kernel_without_pytorch_is_told_what_to_type(tmp_path: Path) -> None:
    notebook = json.loads(written(tmp_path, "jupyter").read_text())
    first = next("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    without = "import sys; sys.modules['torch'] = None\n"
    done = subprocess.run([sys.executable, "-c", without + first], capture_output=True, text=True, check=False)
    assert (done.returncode, "%pip install torch" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("platform", ["colab", "kaggle", "jupyter"])
def test_a_real_kernel_runs_it_and_its_run_is_gone_on_from(tmp_path: Path, platform: str, own_home: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(written(tmp_path, platform), 4)
    nbformat.validate(notebook)
    place = {"metadata": {"path": str(tmp_path)}}
    for _ in range(2):  # A notebook that runs again continues from the newest checkpoint, here the last one.
        nbclient.NotebookClient(notebook, timeout=LONG_S, resources=place).execute()
    shown = json.dumps(notebook)
    assert "evidence.zip</a>" in shown  # Offered for download.
    imported(tmp_path, "fox-41", "--replay")
    assert gpurun("sample", "fox-41", "--prompt", "12 ", "--tokens", "5").returncode == 0
    assert gpurun("export", "fox-41", str(tmp_path / "hf")).returncode == 0
    more = ("--set", "train.steps=30", "--provider", "local", "--name", "fox-42", "--yes")
    assert gpurun("train", "--from", "fox-41", *more).returncode == 0
    receipt = json.loads(gpurun("receipt", "fox-42", "--json").stdout)["data"]["statement"]["predicate"]
    assert (receipt["asked"]["continues"]["run"], receipt["checkpoint"]["latest"]) == ("fox-41", 30)
    assert gpurun("audit", "--strict").returncode == 0
    assert Home(own_home).run_names() == ["fox-41", "fox-42"]
