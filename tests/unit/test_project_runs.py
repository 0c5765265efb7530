"""Tests of `[run.NAME]` in a folder's gpurun.toml: shown, confirmed once at a terminal, and limited in its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.paths import Home
from gpurun.core.run_plan import Request
from tests import command_line
from tests.refusals import lacking

BASELINE = """
[run.baseline]
about = "the paper's"
command = "python train.py --lr 3e-4"
gpu = "1xA100"
outputs = "out/**"
pip = ["numpy<2"]
env = {SEED = 1, STEPS = 20}
disk = 80
total-steps = 20
"""


class Shell:
    """A user in a folder with a gpurun.toml. The requests that `gpurun run` makes there are recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.requests = monkeypatch, list[Request]()

        def started(session: Session, request: Request, *more: Any, **named: Any) -> Result:
            self.requests.append(request)
            return Result()

        monkeypatch.setattr("gpurun.cli.started_run.start_and_follow", started)

    def run(self, *words: str, answer: str = "") -> tuple[int, str]:
        """Type `gpurun run …`, at a terminal if there is an answer; return the exit code and all output."""
        with self.monkeypatch.context() as patched:
            if answer:
                patched.setattr(Session, "interactive", property(lambda session: True))
            done = command_line.gpurun("run", *words, given=answer + "\n")
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def refusal(self, table: str, *words: str) -> dict[str, Any]:
        """Return the only error with which a table for the run `x` is refused."""
        Path("gpurun.toml").write_text(table)
        done = command_line.gpurun("run", "--yes", "--json", "--dry-run", *words, "x")
        (error,) = json.loads(done.stdout)["errors"]
        assert not self.requests
        return dict(error)


@pytest.fixture
def shell(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    folder = tmp_path / "paper"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("train.py").write_text("print('hello')\n")
    Path("gpurun.toml").write_text(BASELINE)
    return Shell(monkeypatch)


def test_a_strangers_run_is_shown_and_asked_about_once(shell: Shell) -> None:
    code, shown = shell.run("--max-cost", "5", "baseline", answer="y")
    assert code == 0
    for words in ("[run.baseline] of gpurun.toml", "python train.py --lr 3e-4", "numpy<2", "SEED", "STEPS", "1xA100"):
        assert words in shown
    assert "rent" in shown
    assert shell.run("--max-cost", "5", "--yes", "baseline")[0] == 0, "without a terminal: it was agreed to"
    first, second = shell.requests
    assert first == second
    assert first.command is not None
    assert first.gpu is not None
    assert (first.command.argv, first.gpu.name) == (("python", "train.py", "--lr", "3e-4"), "A100")
    assert first.command.folder == str(Path.cwd())
    assert (first.command.outputs, first.command.pip) == (("out/**",), ("numpy<2",))
    assert (first.command.env, first.command.total_steps) == ({"SEED": "1", "STEPS": "20"}, 20)
    assert first.command.disk_gb == 80


@pytest.mark.parametrize("words", [["--yes"], ["--yes", "--dry-run"], ["--json"], ["--no-input"], ["--quiet", "-y"]])
def test_nothing_but_a_terminal_agrees_to_it(shell: Shell, words: list[str]) -> None:
    code, shown = shell.run("--max-cost", "5", *words, "baseline")
    assert (code, shell.requests) == (2, [])
    assert "run.not_approved" in shown


def test_a_changed_table_is_asked_about_again_whatever_yes_says(shell: Shell) -> None:
    shell.run("--dry-run", "baseline", answer="y")
    Path("gpurun.toml").write_text(BASELINE + "\n[run.other]\ncommand = 'python other.py'\n")
    assert shell.run("--dry-run", "--yes", "baseline")[0] == 0, "another run's table is another one's"
    Path("gpurun.toml").write_text(BASELINE.replace("train.py --lr", "train.py --key ~/.ssh/id --lr"))
    code, shown = shell.run("--dry-run", "--yes", "--quiet", "baseline", answer="n")
    assert (code, len(shell.requests)) == (3, 2)
    assert "~/.ssh/id" in shown, "nothing is asked about that was not shown"
    assert "this computer" in shown


def test_what_hides_on_a_terminal_is_shown_without_its_escapes(shell: Shell) -> None:
    Path("gpurun.toml").write_text('[run.x]\ncommand = ["bash", "-c", "rm -r ~ \\u001b[1A\\u001b[2K\\r # hello"]\n')
    shown = shell.run("--dry-run", "x", answer="n")[1]
    assert "rm -r ~" in shown
    assert "\x1b[1A" not in shown
    assert "\r" not in shown


def test_what_is_typed_counts_more_and_is_shown_as_that(shell: Shell) -> None:
    flags = ("--gpu", "1xT4", "--disk", "50", "--env", "SEED=7")
    shown = shell.run("--max-cost", "5", *flags, "baseline", answer="y")[1]
    assert lacking(shown, "--gpu 1xT4", "gpu 1xA100") == []
    assert lacking(shown, "--disk 50", "disk 80") == [], "though 50 is the usual"
    (request,) = shell.requests
    assert request.gpu is not None
    assert request.command is not None
    assert (request.gpu.name, request.command.disk_gb) == ("T4", 50)
    assert request.command.env == {"SEED": "7", "STEPS": "20"}, "of variables the one that was typed"


@pytest.mark.parametrize(
    ("own", "of_table", "typed", "cap", "place"),
    [
        ("25", "5", "", 5_000_000, "[run.x] of gpurun.toml"),
        ("25", "5", "40", 40_000_000, "--max-cost"),
        ("", "5", "", None, ""),
        ("", "900", "40", 40_000_000, "--max-cost"),
    ],
)
def test_a_table_lowers_the_users_cap_and_gives_none(
    shell: Shell, own_home: Path, own: str, of_table: str, typed: str, cap: int | None, place: str
) -> None:
    if own:
        Home(own_home).prepare().config.write_text(f"max_cost = {own}\n")
    Path("gpurun.toml").write_text(f'[run.x]\ncommand = "python train.py"\nmax_cost = {of_table}\n')
    shell.run(*(("--max-cost", typed) if typed else ()), "x", answer="y")
    (request,) = shell.requests
    assert (request.max_cost_micros, request.cap_from) == (cap, place)


def test_a_cap_above_the_users_is_refused_by_name(shell: Shell, own_home: Path) -> None:
    Home(own_home).prepare().config.write_text("max_cost = 25\n")
    error = shell.refusal('[run.x]\ncommand = "python train.py"\nmax_cost = 26\n')
    assert error["code"] == "run.not_in_a_table"
    assert lacking(error["message"], "[run.x]", "gpurun.toml", "26", "25") == []


@pytest.mark.parametrize(
    "key",
    ["notify", "exec", "host", "identity", "jump", "lambda_guard", "accept-weak-lease", "provider", "region", "account",
     "stage", "setup", "pass_env", "yes", "home", "python", "log_to"],
)  # fmt: skip
def test_what_is_its_users_own_to_type_is_refused_by_name(shell: Shell, key: str) -> None:
    error = shell.refusal(f'[run.x]\ncommand = "python train.py"\n{key} = "aws"\n')
    assert error["code"] == "run.not_in_a_table"
    assert key.replace("-", "_") in error["message"]
    assert f"--{key.replace('_', '-')}" in error["hint"]


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ('outptus = "out/**"', "run.unknown_key", "outptus"),
        ('secret = {HF_TOKEN = "hf_abcdef"}', "run.secret_value", "secret in [run.x]"),
        ('secret = ["HF_TOKEN=hf_abcdef"]', "run.secret_value", "secret in [run.x]"),
        ('env = {WANDB_API_KEY = "hf_abcdef"}', "run.secret_value", "env.WANDB_API_KEY"),
        ('secret = "RUNPOD_API_KEY"', "run.not_in_a_table", "RUNPOD_API_KEY"),
        ('secret = ["AWS_SECRET_ACCESS_KEY"]', "run.not_in_a_table", "AWS_SECRET_ACCESS_KEY"),
        ('upload = ".."', "run.not_in_a_table", "upload"),
        ('upload = "away"', "run.not_in_a_table", "upload"),
        ('data = "~/private"', "run.not_in_a_table", "data"),
        ('data = "s3://private/notes"', "run.not_in_a_table", "data"),
        ('pip = ["/etc/notes.txt"]', "run.not_in_a_table", "pip"),
        ('include = [".env"]', "run.not_in_a_table", ".env"),
        ("grace = -5", "run.table", "grace"),
        ("disk = 99999", "run.table", "disk"),
        ("hours = nan", "run.table", "hours"),
        ("outputs = 3", "run.table", "outputs"),
    ],
)
def test_a_table_reaches_no_key_and_nothing_outside_its_folder(
    shell: Shell, tmp_path: Path, lines: str, code: str, words: str
) -> None:
    Path("away").symlink_to(tmp_path)
    Path(".env").write_text("HF_TOKEN=hf_" + "a" * 34 + "\n")
    error = shell.refusal(f'[run.x]\ncommand = "python train.py"\n{lines}\n')
    assert error["code"] == code
    assert words in error["message"]
    assert "hf_abcdef" not in error["message"] + error["hint"]


def test_the_nearest_key_is_named(shell: Shell) -> None:
    assert "outputs?" in shell.refusal("[run.x]\ncommand = 'python a.py'\noutptus = 'out'\n")["hint"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ('"python a.py && python b.py"', "it contains '&'"),
        ('"python \'a.py"', "No closing quotation"),
        ("[]", "command"),
    ],
)
def test_a_command_that_would_not_run_as_it_reads_is_refused(shell: Shell, command: str, words: str) -> None:
    error = shell.refusal(f"[run.x]\ncommand = {command}\n")
    assert error["code"] == "run.table"
    assert words in error["message"]


def test_a_name_that_is_nowhere_lists_those_that_are(shell: Shell) -> None:
    code, shown = shell.run("--dry-run", "--yes", "baslne")
    assert (code, shell.requests) == (2, [])
    assert lacking(shown, "baseline?", "gpurun.toml: baseline", "llmc-gpt2-124m, modded-track-3") == []


def test_a_file_wins_by_a_path_and_a_program_behind_dashes(shell: Shell) -> None:
    Path("baseline").write_text("#!/bin/sh\necho file\n")
    shell.run("--dry-run", "./baseline")
    shell.run("--dry-run", "--", "baseline")
    assert [request.command.argv for request in shell.requests if request.command] == [("./baseline",), ("baseline",)]
    assert "run.not_approved" in shell.run("--dry-run", "--yes", "baseline")[1]


def test_other_verbs_read_over_the_runs_of_a_folder(shell: Shell) -> None:
    Path("gpurun.toml").write_text('color = "never"\n[run.x]\nnotify = 3\n')
    assert command_line.gpurun("config", "show").returncode == 0
    Path("gpurun.toml").write_text("[slurm.x]\na = 3\n")
    assert "config." in command_line.gpurun("config", "show", "--json").stdout
