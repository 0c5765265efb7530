"""Tests that each line in the ```sh blocks of the tutorials is a command that works as written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.secrets import child_environment
from tests.clouds.rented import SMALL, Cloud, runpod, somebody
from tests.emulators import guests
from tests.refusals import lacking
from tests.users_scripts import NANOGPT

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str) -> list[str]:
    """Return the lines that a reader of a page types."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def typed(line: str, folder: Path, environment: Mapping[str, str], stdin: str = "") -> str:
    """Run a command in the reader's folder, and return its output and errors; assert that it succeeds."""
    gpurun = f'gpurun() {{ "{sys.executable}" -m gpurun "$@"; }}\n'
    variables = {**environment, "PYTHONPATH": str(DOCS.parent)}
    command = ["bash", "-c", gpurun + line]
    done = subprocess.run(command, cwd=folder, env=variables, input=stdin, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_course_lab_ends_with_what_a_learner_hands_in(tmp_path: Path) -> None:
    environment = child_environment({"GPURUN_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)})
    said = {line.partition(" --")[0]: typed(line, tmp_path, environment) for line in commands("COURSE-LAB.md")}
    assert "28 k parameters" in said["gpurun plan course-lab"]
    assert "0 problems" in said["gpurun audit"]
    assert "0 to 300 " in said["gpurun audit"]
    assert "left out" not in said["gpurun evidence -o card.zip"]
    with zipfile.ZipFile(tmp_path / "card.zip") as handed_in:
        card = handed_in.read("card.md").decode()
    for what in (
        "smoke",
        "device: cpu",
        "step 0300 | loss 0.0",
        "## Sample",
        "trainer/model.py:",
        "sha256",
    ):
        assert what in card
    checked = typed(
        "mkdir cards; mv card.zip cards; gpurun audit --roster cards --replay --strict", tmp_path, environment
    )
    assert "0 to 300 " in checked


def test_the_class_tutorial_works_as_the_teachers_page_says(tmp_path: Path) -> None:
    environment = child_environment({"GPURUN_HOME": str(tmp_path / "teacher"), "HOME": str(tmp_path)})
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question: whether 'tis nobler to suffer. " * 5)
    *made, folder, check = commands("TEACHING.md")
    said = "".join(typed(line, tmp_path, environment) for line in [*made, folder])
    ada = next(line.split("  ")[1].strip() for line in said.splitlines() if line.startswith("Ada"))
    hers = {**environment, "GPURUN_HOME": str(tmp_path / "ada")}
    typed(f"{ada} --data text.txt --provider local --yes", tmp_path, hers)
    typed("gpurun evidence -o cards/ada.zip --with-checkpoint", tmp_path, hers)
    table = typed(f"{check} --replay --strict", tmp_path, environment)
    assert "1 no card · 1 smoke" in table
    assert "replayed: all" in table
    assert "Ada,ada.zip," in (tmp_path / "class.csv").read_text()


def test_both_trainer_changes_of_the_tutorial_work_as_written(tmp_path: Path) -> None:
    environment = child_environment({"GPURUN_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)})
    shutil.copytree(DOCS.parent / "trainer", tmp_path / "trainer")
    page, said = (DOCS / "YOUR-TRAINER.md").read_text(), []
    for kind, text in re.findall(r"^```(sh|diff)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if kind == "diff":
            apply = ["git", "apply", "-p0", "-C1", "-"]
            subprocess.run(apply, cwd=tmp_path, env=environment, input=text, text=True, check=True)
            continue
        said += [typed(line, tmp_path, environment) for line in text.splitlines()]
    _, trained, sampled, rehearsed, planned = said
    assert "closed, exit 0" in trained
    assert "def " in sampled, "by the run's own copy: gpurun's trainer has no such key"
    assert "closed, exit 0" in rehearsed
    assert "cap $5.00" in planned
    audited = typed("gpurun audit --replay --all", tmp_path, environment)
    assert "0 problems, 2 warnings" in audited
    assert all(f"{run}: not checked: " in audited for run in ("gqa", "lion"))
    assert "Memory" in planned
    assert "rehearsed" in planned


def test_the_gpt_2_tutorial_rehearses_and_plans_under_its_cap(tmp_path: Path) -> None:
    environment = child_environment({"GPURUN_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)})
    rehearsed, planned = (typed(line, tmp_path, environment) for line in commands("GPT-2.md"))
    assert "closed, exit 0" in rehearsed
    assert "cap $25.00" in planned


def take_once(cloud: Cloud, home: Path, name: str) -> threading.Thread:
    """Start a thread that lets the cloud take a run's first machine away once a checkpoint is at home."""
    folder = home / "runs" / name / "artifacts"

    def take() -> None:
        for _ in ticks(SystemClock(), 0.1, 240):
            if list(folder.rglob("*.state.json")) or list(folder.rglob("ckpt.pt")):
                with cloud.emulator.world.lock:
                    for pod in cloud.alive():
                        cloud.emulator.world.act(pod.id, "stop")
                return

    taking = threading.Thread(target=take)
    taking.start()
    return taking


@pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")
def test_the_cheapest_page_moves_a_training_and_a_script(tmp_path: Path) -> None:
    """The page's commands must work with --yes on a machine without CUDA.

    The training has fewer steps and smaller batches, and saves and evaluates more often. The script is a stand-in
    for nanoGPT that saves every 300 steps.
    """
    short = ("--set train.steps=150 --set train.batch_tokens=1024 --set train.micro_batch=16 "
             "--set train.checkpoint_every=50 --set eval.every=50 --set eval.tokens=2048")  # fmt: skip
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "train.py").write_text(NANOGPT.replace("i % 10", "i % 300"))
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        said = {}
        for line in commands("CHEAPEST.md"):
            verb = line.split()[1]
            if verb not in ("train", "run"):
                said[" ".join(line.split()[1:3])] = typed(line, lab, user.environment())
                continue
            name = line.partition("--name ")[2].split()[0]
            taking = take_once(cloud, user.home, name)
            more = f"--yes --accept-cpu {short if verb == 'train' else ''}"
            typed(line.replace(f"--name {name}", f"--name {name} {more}"), lab, user.environment())
            taking.join()
        assert cloud.alive() == []
        assert "On demand" in said["plan mini-gpt"]
        for name in ("cheap-1", "cheap-2"):
            assert lacking(said[f"receipt {name}"], "leg 2", "on demand") == []
        assert "0 problems" in said["audit"]


@pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "guests boot")
def test_the_first_dollar_tutorial_spends_and_proves_a_dollar(tmp_path: Path) -> None:
    """The tutorial's commands must work for under a dollar, with --yes and a small training without CUDA."""
    with runpod(tmp_path / "cloud") as cloud, somebody(cloud, tmp_path / "home") as user:
        environment = user.environment()
        key = environment.pop("RUNPOD_API_KEY")
        said = {}
        for line in commands("FIRST-DOLLAR.md"):
            more = f" --yes --accept-cpu {' '.join(SMALL)}" if line.startswith("gpurun train") else ""
            stdin = f"{key}\n" if line.startswith("gpurun auth") else ""
            said[line.split()[1]] = typed(line + more, tmp_path, environment, stdin)
        assert cloud.alive() == []
        assert cloud.meter.total_micros() < 1_000_000
        assert "0 problems" in said["audit"]
