"""Tests of named commands: a public repository's script runs from a user's clone, and its log gives the scores."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.paths import Home
from gpurun.core.secrets import child_environment
from gpurun.jobs.commands import named_command
from gpurun.jobs.commands.named_command import approve, find_named, packaged_commands, read_packaged
from tests.command_line import gpurun

SPEEDRUN = """
for step in 0 1 2 3; do
  echo "step 0000$step/00004 (25.00%) | loss: $((9 - step)).5 | lrm: 1.00 | dt: 12.34ms | tok/sec: 1,234,567 | epoch: 1"
done
echo "Step 00004 | Validation bpb: 0.812345"
echo "Minimum validation bpb: 0.812345"
echo "CORE metric: 0.2612"
mkdir -p out && echo weights > out/model_000004.pt
"""
NAMED = """
about = "made up"
repository = "https://example.org/some/nano"
commit = "{commit}"
gpu = "8xH100"
outputs = ["out/**"]
command = ["bash", "runs/speedrun.sh"]
"""


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], env=child_environment(), check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a clone of a made-up repository, for which gpurun has one named command, nano-speedrun."""
    folder = tmp_path / "nano"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "speedrun.sh").write_text(SPEEDRUN)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    place = tmp_path / "commands"
    place.mkdir()
    (place / "nano-speedrun.toml").write_text(NAMED.format(commit=git(folder, "rev-parse", "HEAD")))
    monkeypatch.setattr(named_command, "_packaged_folder", lambda: place)
    return folder


def envelope(*words: str) -> dict[str, Any]:
    done = gpurun(*words)
    assert done.stdout, done.stderr
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def run(clone: Path, *flags: str, command: tuple[str, ...] = ("nano-speedrun",)) -> dict[str, Any]:
    """Run the named command here, with flags before its name as before any command, and return the envelope."""
    return envelope("run", "--provider", "local", "--upload", str(clone), "--yes", "--json", *flags, *command)


@pytest.mark.parametrize("name", packaged_commands())
def test_each_names_a_public_commit_and_brings_outputs_home(name: str) -> None:
    named = read_packaged(name)
    assert named.repository.startswith("https://github.com/")
    assert named.outputs
    assert named.hours is not None, "no public run is paid for a day because it hangs"


def test_it_runs_in_its_clone_its_receipt_has_losses_and_core(own_home: Path, clone: Path) -> None:
    assert run(clone, "--name", "fox-1")["ok"]
    receipt = envelope("receipt", "fox-1", "--json")["data"]["statement"]["predicate"]
    assert receipt["asked"]["command"]["argv"] == ["bash", "runs/speedrun.sh"]
    figures = receipt["training"]["figures"]
    assert (figures["last_step"], figures["last_loss"], figures["core"]["core"]) == (3, 6.5, 0.2612)
    assert (own_home / "runs/fox-1/artifacts/outputs/out/model_000004.pt").exists()
    assert "CORE 0.2612" in gpurun("receipt", "fox-1").stdout
    (reported,) = envelope("report", "fox-1", "--json")["data"]["runs"]
    assert (reported["final_loss"], reported["core"], reported["bits_per_byte"]) == (6.5, 0.2612, 0.812345)
    assert gpurun("audit", "--strict").returncode == 0


def _elsewhere(clone: Path) -> None:
    (clone / ".git").rename(clone.parent / "git")


def _another(clone: Path) -> None:
    git(clone, "commit", "-q", "--allow-empty", "-m", "two")


def _changed(clone: Path) -> None:
    (clone / "runs" / "speedrun.sh").write_text("echo mine\n")


@pytest.mark.parametrize(
    ("spoil", "name", "cure"),
    [
        (_elsewhere, "https://example.org/some/nano", "git clone https://example.org/some/nano"),
        (_another, "https://example.org/some/nano", "checkout"),
        (_changed, "nano-speedrun", "-- bash runs/speedrun.sh"),
    ],
)
def test_what_is_not_that_commit_is_not_run_by_that_name(
    own_home: Path, clone: Path, spoil: Any, name: str, cure: str
) -> None:
    spoil(clone)
    (error,) = run(clone)["errors"]
    assert error["code"] == "run.other_clone"
    assert name in error["message"]
    assert cure in error["hint"]


def test_what_is_typed_counts_more_than_what_the_name_stands_for(own_home: Path, clone: Path) -> None:
    ended = run(clone, "--outputs", "*.txt", "--name", "fox-2")
    assert ended["exit_code"] == 6, "nothing of that name was left"
    assert not (own_home / "runs/fox-2/artifacts/outputs/out").exists()


def test_a_flag_behind_its_name_is_refused_and_not_given_to_it(own_home: Path, clone: Path) -> None:
    (error,) = run(clone, command=("nano-speedrun", "--max-cost", "60"))["errors"]
    assert error["code"] == "run.named_words"
    assert "gpurun run --max-cost 60 … nano-speedrun" in error["hint"]


def test_a_folders_own_run_is_the_same_table_and_comes_home(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lab").mkdir()
    Path("lab/go.sh").write_text("mkdir out && echo $SEED > out/seed.txt\n")
    Path("gpurun.toml").write_text(
        '[run.small]\ncommand = "bash go.sh"\nupload = "lab"\noutputs = "out/**"\nenv = {SEED = 7}\n'
    )
    named = find_named("small", tmp_path, ())
    assert named is not None
    approve(named, Home(own_home))
    assert envelope("run", "--provider", "local", "--yes", "--json", "--name", "fox-3", "small")["ok"]
    assert (own_home / "runs/fox-3/artifacts/outputs/out/seed.txt").read_text() == "7\n"
    assert gpurun("audit", "--strict").returncode == 0
