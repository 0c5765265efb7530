"""Tests of a command's upload: which files of its folder are sent, and what the user learns before renting."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.command import Command
from gpurun.core.errors import UsageError
from gpurun.core.journal_events import Event, RunOpened
from gpurun.core.money import Micros
from gpurun.core.run_plan import Choices
from gpurun.jobs.command import CommandJob
from gpurun.jobs.commands import work_folder as folders
from gpurun.jobs.commands.work_folder import work_folder
from gpurun.jobs.requirements import requirement_lines, with_pip
from gpurun.ledger.log_facts import command_verdict
from gpurun.planning.command_proposal import judge_offer, least_cap
from gpurun.planning.transfer import Load
from gpurun.providers.catalog import all_offers
from tests.refusals import refusal
from tests.unit.report_samples import plan_of
from tests.whole_records import whole


def command(folder: Path, *argv: str) -> Command:
    return Command(argv=argv or ("python", "train.py"), folder=str(folder))


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Return a typical work folder, with .gitignore files, data and caches."""
    files = {
        "train.py": "import model",
        "model.py": "",
        ".gitignore": "data/\n*.bin\n!keep.bin\n",
        "data/big.txt": "x" * 5000,
        "keep.bin": "x",
        "drop.bin": "x" * 300,
        "sub/.gitignore": "local.txt\n",
        "sub/local.txt": "x",
        "sub/words.txt": "x",
        ".git/HEAD": "x",
        "__pycache__/a.pyc": "x",
    }
    for name, text in files.items():
        path = tmp_path / "lab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "lab"


def test_what_git_ignores_stays_here_and_is_named_with_its_size(lab: Path) -> None:
    found = work_folder(command(lab))
    assert sorted(found.files) == [".gitignore", "keep.bin", "model.py", "sub/.gitignore", "sub/words.txt", "train.py"]
    assert found.left_out["data"] == 5000
    assert found.words == "data (5 kB), drop.bin (300 B), sub/local.txt (1 B)"
    (lab / ".gpurunignore").write_text("!drop.bin\nsub/\n")
    again = work_folder(command(lab))
    assert "drop.bin" in again.files
    assert "sub" in again.left_out


def test_a_card_names_no_script_that_changed_after_the_upload(lab: Path, tmp_path: Path) -> None:
    """Otherwise a hand-in would show a later version of the script than the one that ran."""
    work = tmp_path / "work"
    folders.copy_work_folder(command(lab), work_folder(command(lab)), work)
    job = CommandJob(recipe="train.py", recipe_sha256="0" * 64, command=command(lab))
    plan = plan_of("fox-41")
    plan = plan.model_copy(update={"data": plan.data.model_copy(update={"beside": str(tmp_path)})})
    plan = plan.model_copy(update={"job": job, "bundle_sha256": job.digest(plan, tmp_path)})
    ((title, words),) = job.code(plan, tmp_path)
    assert (title, words.partition(", ")[0]) == ("Code", "train.py")
    (work / "train.py").write_text("import better_model")
    assert job.code(plan, tmp_path) == []


def test_a_link_brings_only_its_file_and_copies_stay_executable(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "vocab.txt").write_text("words")
    (lab / "vocab.txt").symlink_to(tmp_path / "outside" / "vocab.txt")
    (lab / "elsewhere").symlink_to(tmp_path / "outside")
    (lab / "run.sh").write_text("true")
    (lab / "run.sh").chmod(0o755)
    found = work_folder(command(lab))
    copied = folders.copy_work_folder(command(lab), found, tmp_path / "copy")
    assert (tmp_path / "copy" / "vocab.txt").read_text() == "words"
    assert not (tmp_path / "copy" / "vocab.txt").is_symlink()
    assert "elsewhere" in found.left_out
    assert copied.executable == ("run.sh",)


def test_a_folder_that_is_not_a_program_is_refused_with_sizes(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lab / "videos").mkdir()
    (lab / "videos" / "a.mp4").write_bytes(b"x" * 2000)
    monkeypatch.setattr(folders, "MOST_BYTES", 1000)
    with refusal(UsageError, "run.large", "2") as refused:
        work_folder(command(lab))
    assert "--data" in refused.value.hint


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("train.py", "--n", "3"), ["{python}", "train.py", "--n", "3"]),
        (("python", "-m", "x"), ["{python}", "-m", "x"]),
        (("torchrun", "train.py"), ["torchrun", "train.py"]),
    ],
)
def test_python_is_the_one_with_torch_and_gets_the_checkpoint(argv: tuple[str, ...], words: list[str]) -> None:
    command = Command(argv=argv, resume_arg="--resume {}", checkpoints="*.pt")
    assert command.words == words
    assert command.model_copy(update={"resumed": "out/c 1.pt"}).words == [*words, "--resume", "out/c 1.pt"]


def test_pip_installs_for_torchs_python_after_the_users_script(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torchtune==0.6\n# why\neinops\n")
    lines = [*requirement_lines(str(tmp_path / "requirements.txt")), "rich>=13"]
    choices = with_pip(Choices(setup="echo first >> noted"), lines)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    is_question = '[ "$1" = -c ] || [ "$3" = --version ]'
    python.write_text(f'#!/bin/sh\n{is_question} && exit 0\necho "$@" >> noted\ncat requirements.gpurun.txt >> noted\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-e", "-c", choices.setup], cwd=tmp_path, env=environment, check=True)
    installed = "-m pip install -q --no-input -r requirements.gpurun.txt"
    noted = (tmp_path / "noted").read_text().splitlines()
    assert noted == ["first", installed, "torchtune==0.6", "# why", "einops", "rich>=13"]


def test_a_script_that_no_python_reads_is_refused(lab: Path) -> None:
    (lab / "bad.py").write_text("def (:")
    with refusal(UsageError, "run.not_python", "1"):
        work_folder(command(lab / "bad.py", "bad.py"))
    assert sorted(work_folder(command(lab / "model.py", "model.py")).files) == ["model.py"]


def test_no_value_of_a_variable_is_told(lab: Path) -> None:
    recorded: dict[str, Any] = Command(argv=("x",), env={"A": "secret-1"}, secrets=("B",)).recorded
    assert recorded == {"argv": ["x"], "env": ["A"], "secrets": ["B"]}


@pytest.mark.parametrize(
    ("provider", "tally", "kind"),
    [
        ("runpod", {"looks": 9, "busy": 5, "own": 4, "most_mib": 900}, "gpu, rented"),
        ("runpod", {"looks": 9, "busy": 5, "own": 0, "most_mib": 900}, "gpu, rented"),
        ("runpod", {"looks": 9, "busy": 0, "own": 0, "most_mib": 4}, "smoke"),
        ("runpod", {}, "smoke"),
        ("ssh", {"looks": 9, "busy": 9, "own": 0, "most_mib": 900}, "smoke"),
        ("ssh", {"looks": 9, "busy": 9, "own": 2, "most_mib": 900}, "gpu, as the machine says"),
        ("runpod", {"looks": "9", "busy": True, "own": [], "most_mib": None}, "smoke"),
    ],
)
def test_a_commands_verdict_rests_on_the_cards_not_its_words(provider: str, tally: dict[str, Any], kind: str) -> None:
    opened = RunOpened(**whole(Event.RUN_OPENED, {"provider": provider, "endpoint": "", "mode": "paid"}))
    machine: Any = {"provider": provider, "id": "pod-1"}
    verdict = command_verdict(opened, machine, tally, "done")
    assert verdict["is"] == kind
    assert verdict["not_shown"]
    elsewhere = opened.model_copy(update={"endpoint": "http://127.0.0.1"})
    assert command_verdict(elsewhere, machine, tally, "done")["is"] == "not a provider"


@pytest.mark.parametrize(("grace_s", "hours"), [(60, None), (3600, None), (60, 0.01), (600, 0.5)])
def test_no_lease_is_bought_that_would_stop_a_command_at_once(grace_s: int, hours: float | None) -> None:
    """The lease has the time to save and minutes of running, even under the smallest cap that a refusal names."""
    command = Command(argv=("x",), grace_s=grace_s)
    load = Load(1_000_000, command.output_bytes, command.disk_gb)
    offer = next(row for row in all_offers() if row.gpu_count == 1 and row.provider == "runpod")
    needed = least_cap(offer, command, load, hours)
    for share in (0.3, 0.7, 0.9, 0.999, 1.0, 1.5):
        judged = judge_offer(offer, command, load, cap=Micros(int(needed * share)), hours=hours)
        if share < 0.95:
            assert judged.lease is None
        if share >= 1.0:
            assert judged.lease is not None
            runs_s = judged.lease.train_s - command.save_s
            assert runs_s >= min(300, 300 if hours is None else hours * 3600 - 1)
            assert judged.worst_micros is not None
            assert judged.worst_micros <= int(needed * share)
