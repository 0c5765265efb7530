"""Tests that a class check accuses none of thirty honest learners, whose runs are really trained and recomputed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import gpurun

pytestmark = [pytest.mark.slow, pytest.mark.torch]
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows "
EACH = 3
# Honest ways to train: with changed settings, or on a computer with another environment.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "as it is": ((), {}),
    "longer": (("--set", "train.steps=450"), {}),
    "one thread": ((), {"OMP_NUM_THREADS": "1"}),
    "bf16": (("--set", "train.precision=bf16"), {}),
    "wider": (("--set", "model.width=48"), {}),
    "two threads": ((), {"OMP_NUM_THREADS": "2"}),
    "killed and resumed": (("--set", "train.checkpoint_every=10"), {}),  # Slow enough to be killed.
    "moved": ((), {}),
    "handed in twice": ((), {}),
}


def training(home: Path, text: Path, word: str, settings: tuple[str, ...]) -> list[str]:
    """Return the command line that trains the course's lab in a learner's own home."""
    words = ["train", "course-lab", *settings, "--data", str(text), "--provider", "local", "--challenge", word, "--yes"]
    return [sys.executable, "-m", "gpurun", *words, "--no-progress", "--name", "fox-41", "--home", str(home)]


def killed_and_resumed(command: list[str], home: Path, environment: dict[str, str]) -> None:
    """Kill every process of a training after its first checkpoint, and resume the run."""
    events = home / "runs" / "fox-41" / "events.jsonl"
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while not (events.exists() and '"kind":"checkpoint"' in events.read_text()):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(
        [*command[:3], "resume", "fox-41", "--no-progress", "--home", str(home)], env=environment, check=True
    )


@pytest.fixture
def folder(tmp_path: Path, own_home: Path) -> Path:
    """Return the folder of a class, with the teacher's roster and the learners' cards."""
    (tmp_path / "text.txt").write_text(TEXT * 3)
    ways = [*WAYS.items()] * EACH
    (tmp_path / "students.txt").write_text("".join(f"learner {number}\n" for number in range(len(ways))))
    made = gpurun(
        "roster", "new", "ml-2026", "--students", str(tmp_path / "students.txt"), "-o", str(tmp_path / "class")
    )
    assert made.returncode == 0, made.stderr
    words = [student["challenge"] for student in json.loads((tmp_path / "class").read_bytes())["students"]]
    (tmp_path / "cards").mkdir()
    for number, (way, (settings, more)) in enumerate(ways):
        home, environment = tmp_path / f"home-{number}", {**os.environ, **more}
        command = training(home, tmp_path / "text.txt", words[number], settings)
        if way == "killed and resumed":
            killed_and_resumed(command, home, environment)
        else:
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        if way == "moved":
            home = home.rename(tmp_path / f"another place {number}")
        card = tmp_path / "cards" / f"{number:02} {way}.zip"
        done = gpurun("evidence", "-o", str(card), "--with-checkpoint", "--home", str(home))
        assert done.returncode == 0, done.stderr
        if way == "handed in twice":
            shutil.copy(card, tmp_path / "cards" / f"{number:02} {way}, again.zip")
    return tmp_path


def test_of_thirty_honest_cards_computed_again_none_is_accused(folder: Path) -> None:
    words = ("--class", str(folder / "class"), "--replay", "--json")
    done = gpurun("audit", "--roster", str(folder / "cards"), *words)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["data"]["rows"]
    assert [row["problems"] for row in rows] == [[]] * 30
    assert done.returncode == 0
