"""Tests that every error appears in the requested output format, and that the exit code shows its kind."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.paths import Home
from gpurun.core.run_plan import Request
from gpurun.ledger.run_lock import RunLock
from gpurun.ledger.runs import find_run
from tests.command_line import gpurun
from tests.lifecycle.tiny_runs import make_run
from tests.refusals import lacking
from tests.unit.report_samples import finished_run, opened_run

WRONG = [
    (["train", "mini-gtp", "--dry-run"], 2, "recipe.unknown", "mini-gpt"),
    (["train", "mini-gpt", "--dry-run", "--set", "model.layerz=3"], 2, "set.unknown_key", "model.layers"),
    (["train", "mini-gpt", "--dry-run", "--set", "heads=3"], 2, "recipe.does_not_add_up", ""),
    (["train", "--dry-run", "--gpu", "8xFOO"], 2, "gpu.unknown", ""),
    (["train", "--dry-run", "--max-cost", "-1"], 2, "money.not_positive", ""),
    (["train", "--dry-run", "--max-cost", "nan"], 2, "money.not_positive", ""),
    (["train", "--dry-run", "--max-cost", "abc"], 2, "money.not_a_number", ""),
    (
        ["plan", "mini-gpt", "--price-per-hour", "-1"],
        2,
        "money.not_positive",
        "--price-per-hour",
    ),
    (["plan", "mini-gpt", "--hours", "0"], 2, "hours.bad", "--hours 2.5"),
    (["plan", "mini-gpt", "--give-up-after", "45"], 2, "usage.give_up_after", "--give-up-after 45m"),
    (["plan", "mini-gpt", "--give-up-after", "1m"], 2, "usage.give_up_after", "45m"),
    (["plan", "mini-gpt", "--idle", "0"], 2, "usage.idle", "--idle off"),
    (["plan", "mini-gpt", "--idle", "30s"], 2, "usage.idle", "--idle 30m"),
    (["train", "mini-gpt", "--dry-run", "--silent", "25h"], 2, "usage.silent", "--silent 30m"),
    (["plan", "mini-gpt", "--setup-limit", "0"], 2, "usage.setup_limit", "--setup-limit 30"),
    (["plan", "mini-gpt", "--setup-limit", "nan"], 2, "usage.setup_limit", "--setup-limit 30"),
    (["plan", "mini-gpt", "--setup-limit", "1441"], 2, "usage.setup_limit", "--setup-limit 30"),
    (["offers", "--max-price", "nan"], 2, "money.not_positive", "--max-price"),
    (["train", "mini-gpt", "--provider", "local", "--data", "/nowhere"], 2, "data.missing", ""),
    (["train", "mini-gpt"], 2, "cap.missing", "--max-cost"),
    (["train", "gpt2-124m-owt", "--max-cost", "25"], 2, "data.missing", "gpurun data prepare"),
    (["train", "mini-gpt", "--max-cost", "3"], 4, "auth.no_provider", "--dry-run"),
    (["plan", "gpt2-124m", "--max-cost", "3"], 5, "offer.over_cap", "--max-cost"),
    (["plan", "--gpu", "1xA100", "--provider", "aws"], 5, "offer.none", "8xA100"),
    (["train", "mini-gpt", "--dry-run", "--provider", "runpad"], 2, "provider.unknown", "runpod"),
    (["attach", "nosuch"], 2, "run.unknown", "ps --all"),
    (["destroy", "nosuch", "--yes"], 2, "run.unknown", "--home DIR"),
    (["receipt", "@last"], 2, "run.unknown", ""),
    (["ps", "--bogus"], 2, "usage", "gpurun ps --help"),
    (["roster", "new", "c1"], 2, "usage", "gpurun roster new ml-2026 --students students.txt"),
    (["stop"], 2, "usage", "gpurun stop fox-41"),
    (["nosuchverb"], 2, "usage", "gpurun --help"),
    (["ps", "--color", "pink"], 2, "usage.color", ""),
    (["audit", "--since", "yesterday"], 2, "usage.since", ""),
    (["reap", "--older-than", "²h"], 2, "usage.older_than", "30m"),
    (["reap", "--older-than", f"{10**12}d"], 2, "usage.older_than", "30m"),
    (["pack", "/nowhere"], 2, "pack.missing", ""),
    (["recipes", "new", "../evil"], 2, "recipe.bad_name", ""),
    (["recipes", "new", 'a"b'], 2, "recipe.bad_name", "my-recipe"),
    (["recipes", "new", "my recipe"], 2, "recipe.bad_name", "my-recipe"),
    (["recipes", "new", ".."], 2, "recipe.bad_name", "my-recipe"),
    (["train", "mini-gpt", "--dry-run", "--name", "../x"], 2, "run.bad_name", ""),
]


@pytest.mark.parametrize(("arguments", "code", "name", "hint"), WRONG, ids=[" ".join(wrong[0]) for wrong in WRONG])
def test_wrong_input_is_told_in_words_and_in_json(arguments: list[str], code: int, name: str, hint: str) -> None:
    done = gpurun(*arguments, "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"], answer["ok"]) == (code, code, False)
    assert answer["errors"][0]["code"] == name
    assert hint in answer["errors"][0]["hint"]
    spoken = gpurun(*arguments)
    assert (spoken.returncode, spoken.stdout) == (code, "")
    assert f"[{name}]" in spoken.stderr
    assert "Traceback" not in spoken.stderr


def test_help_names_no_default_that_is_none() -> None:
    help_text = gpurun("train", "--help").stdout
    assert "--hours H" in help_text
    assert "default: 0" not in help_text


def test_a_malformed_recipe_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('about = "x"\n[model\nlayers = 2\n')
    assert "line 2" in gpurun("train", str(path), "--dry-run").stderr


def test_a_home_that_cannot_be_used_is_told() -> None:
    words = ["train", "mini-gpt", "--dry-run", "--home", "/proc/nope"]
    done = subprocess.run([sys.executable, "-m", "gpurun", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "home.unusable" in done.stderr


def test_a_broken_plan_of_one_run_hides_no_other(own_home: Path) -> None:
    make_run(Home(own_home), "owl-7")
    broken = make_run(Home(own_home), "fox-41")
    broken.plan.write_text("not json")
    done = gpurun("ps", "--json")
    answer = json.loads(done.stdout)
    assert [run["run"] for run in answer["data"]["runs"]] == ["owl-7"]
    assert (done.returncode, answer["errors"][0]["code"]) == (10, "run.plan_damaged")


def test_a_program_asking_for_the_runs_gets_progress_and_cost(own_home: Path) -> None:
    begun = make_run(Home(own_home), "fox-41")
    begun.events.write_bytes(b'{"kind": "step", "wall": 1.0, "elapsed_s": 1.0, "step": 7, "loss": 2.5}\n')
    make_run(Home(own_home), "owl-7")
    runs = {run["run"]: run for run in json.loads(gpurun("ps", "--json").stdout)["data"]["runs"]}
    progress = [(run["step"], run["steps"], run["spent_micros"], run["worst_micros"]) for run in runs.values()]
    assert progress == [(7, 40, 0, 0), (None, 40, 0, 0)]


def test_a_full_disk_is_no_bug_of_ours(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*given: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gpurun.core.credentials.write_atomic", raise_disk_full)
    words = ["auth", "set", "runpod", "--json"]
    shown = CliRunner().invoke(build_app(), words, input="rpa_0123456789abcdef\n", standalone_mode=False)
    answer = json.loads(shown.output)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (4, "disk.full")
    assert str(own_home) in answer["errors"][0]["message"]


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["collect", "fox-41", "--to", "~nobody-here/x"], 2, "usage.path"),
        (["plan", "gpt2-124m", "--data", "~nobody-here/x"], 2, "usage.path"),
        (["data", "inspect", "~nobody-here/x"], 2, "usage.path"),
        (["collect", "fox-41", "--to", "x" * 300], 4, "path.unusable"),
        (["plan", "gpt2-124m", "--data", "x" * 300], 4, "path.unusable"),
    ],
    ids=lambda one: " ".join(one)[:30] if isinstance(one, list) else None,
)
def test_a_path_that_cannot_be_is_no_bug_of_ours(own_home: Path, words: list[str], exit_code: int, code: str) -> None:
    make_run(Home(own_home), "fox-41")
    shown = CliRunner().invoke(build_app(), [*words, "--json"], standalone_mode=False)
    answer = json.loads(shown.stdout)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (exit_code, code)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN], ids=errno.errorcode.get)
def test_a_home_on_a_failing_or_absent_disk_is_not_our_bug(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A failing disk, a restarted file server or a broken sshfs must not be reported as a bug of gpurun."""
    log = make_run(Home(own_home), "fox-41").log
    log.write_bytes(b"a line\n")
    away = OSError(number, os.strerror(number), str(log))
    monkeypatch.setattr("gpurun.cli.commands.logs.open_regular", Mock(side_effect=away))
    shown = CliRunner().invoke(build_app(), ["logs", "fox-41", "--json"], standalone_mode=False)
    answer = json.loads(shown.stdout)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (4, "path.unusable")
    assert lacking(answer["errors"][0]["message"], str(log), os.strerror(number)) == []


def test_a_bug_of_ours_puts_its_trace_in_a_file_and_says_so() -> None:
    app = typer.Typer()
    verb(app, "broken", examples=["gpurun broken"])(broken_verb)
    verb(app, "other", examples=["gpurun other"])(broken_verb)
    shown = CliRunner().invoke(app, ["broken", "--json"], standalone_mode=False)
    answer = json.loads(shown.output)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (1, "bug")
    trace = Path(answer["errors"][0]["hint"].split(" is in ")[1].split(";")[0])
    assert "ZeroDivisionError" in trace.read_text()
    trace.unlink()


@pytest.mark.parametrize("named", ["mine.toml", "./mine.toml", "../a b/mine.toml"])
def test_a_recipe_of_ones_own_is_found_again_from_any_folder(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    given: list[Request] = []
    monkeypatch.setattr("gpurun.cli.commands.plan.plan_run", lambda session, request, *_, **__: given.append(request))
    CliRunner().invoke(build_app(), ["plan", named])
    monkeypatch.chdir("/")
    assert (Path(given[0].recipe).is_absolute(), Path(given[0].recipe).resolve()) == (True, tmp_path / "a b/mine.toml")
    assert shlex.split(given[0].recipe_word) == [given[0].recipe]


def test_a_taken_name_is_refused_before_anything_is_prepared(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(Home(own_home), "fox-41")
    monkeypatch.setattr("gpurun.cli.commands.plan.plan_run", lambda *_, **__: pytest.fail("a plan was made"))
    words = ["train", "mini-gpt", "--dry-run", "--name", "fox-41", "--json"]
    answer = json.loads(CliRunner().invoke(build_app(), words, standalone_mode=False).stdout)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (12, "run.name_taken")


def broken_verb(session: Session) -> Result:
    """Divide by zero."""
    return Result(data={"never": 1 // 0})


def test_pack_lists_and_refuses_by_name_and_writes_clean_folders(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"12")
    clean = gpurun("pack", str(folder), "-o", str(tmp_path / "out.tar.zst"), "--json")
    assert clean.returncode == 0
    (tmp_path / "device").symlink_to("/dev/null")
    packed = json.loads(gpurun("pack", str(folder), "-o", str(tmp_path / "device"), "--json").stdout)["data"]
    assert packed["packed_bytes"] == (tmp_path / "out.tar.zst").stat().st_size
    assert (tmp_path / "device").is_char_device(), "a device is written to and never replaced"
    (folder / "id_rsa").write_text("no")
    (folder / "away").symlink_to("/etc/passwd")
    listed = json.loads(gpurun("pack", str(folder), "--dry-run", "--json").stdout)
    assert [file["name"] for file in listed["data"]["files"]] == ["data/a.bin"]
    assert {one["code"] for one in listed["data"]["refused"]} == {"pack.secret", "pack.link"}
    refused = gpurun("pack", str(folder), "-o", str(tmp_path / "second.tar.zst"))
    assert refused.returncode == 2
    assert not (tmp_path / "second.tar.zst").exists()
    (folder / "away").unlink()
    (tmp_path / "way").symlink_to(folder)
    allowed = gpurun("pack", str(folder), "--allow-secret", str(tmp_path / "way" / "id_rsa"), "--json")
    assert [file["name"] for file in json.loads(allowed.stdout)["data"]["files"]] == ["data/a.bin", "data/id_rsa"]
    assert "pack.not_there" in gpurun("pack", str(folder), "--allow-secret", str(tmp_path / "id_rsa")).stderr


def test_an_unfinished_run_is_mentioned_before_the_next_plan(own_home: Path) -> None:
    make_run(Home(own_home), "fox-41")
    (own_home / "runs/fox-41/journal.jsonl").write_bytes(b"")
    assert "gpurun resume fox-41" in gpurun("recipes", "list").stderr


@pytest.mark.parametrize("lost", ["request", "plan"])
def test_a_run_without_its_request_or_plan_is_not_forgotten(own_home: Path, lost: str) -> None:
    """The run's machine is still billed, so `ps` must show the run."""
    run = opened_run(Home(own_home), "fox-41")
    run.write(run.opened(), run.intended(), run.created())
    getattr(run.folder, lost).unlink()
    shown = CliRunner().invoke(build_app(), ["ps", "--json"], standalone_mode=False)
    answer = json.loads(shown.stdout)
    expected = {"request": ([run.folder.name], [], 9), "plan": (["fox-41"], ["run.plan_damaged"], 9)}[lost]
    codes = [error["code"] for error in answer["errors"]]
    assert ([row["run"] for row in answer["data"]["runs"]], codes, answer["exit_code"]) == expected
    assert find_run(Home(own_home), "@last") == "fox-41"


def test_the_last_run_is_the_last_one_in_a_copy_of_the_home_too(own_home: Path) -> None:
    """A copy of a home has other file times: `destroy @last` must still find the run that was opened last."""
    for name, begun_wall in (("owl-7", 5e8), ("fox-41", 1e9), ("ant-3", 7e8)):
        run = opened_run(Home(own_home), name)
        run.clock.jump_wall(begun_wall - run.clock.wall())
        run.write(run.opened())
    assert find_run(Home(own_home), "@last") == "fox-41"


@pytest.mark.parametrize("home", ["~nobody-here/x", "/dev/null"])
def test_run_names_complete_silently_where_there_is_no_home(home: str) -> None:
    """Otherwise a traceback appears in the middle of the line that the user types."""
    assert completed("gpurun receipt ", GPURUN_HOME=home) == []


def completed(line: str, **environment: str) -> list[str]:
    """Return the words that the shell offers as completions of a line."""
    typed = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_GPURUN_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['gpurun']; from gpurun.cli.app import main; main()"]
    words = {**os.environ, **typed, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gpurun plan --gpu 8xA1", ["8xA100", "8xA10G"]),
        ("gpurun offers --gpu GH", ["GH200"]),
        ("gpurun train mini-gpt --set train.spike_", ["train.spike_z="]),
        ("gpurun plan --set model.lay", ["model.layers="]),
        ("gpurun plan --set nothing.", []),
    ],
)
def test_gpus_and_the_keys_of_recipes_are_completed(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


def test_a_home_that_is_a_file_has_not_just_no_runs(tmp_path: Path) -> None:
    """`ps` must not show "no runs" for a mistyped home, while a run in the right home is billed."""
    (tmp_path / "file").write_text("")
    for words in (["ps"], ["audit"]):
        shown = CliRunner().invoke(build_app(), [*words, "--json", "--home", str(tmp_path / "file")])
        answer = json.loads(shown.stdout)
        assert (answer["exit_code"], answer["errors"][0]["code"]) == (4, "home.unusable")


def test_where_no_runs_are_the_home_is_named(tmp_path: Path) -> None:
    shown = CliRunner().invoke(build_app(), ["ps", "--home", str(tmp_path / "mistyped")])
    assert f"{tmp_path}/mistyped" in shown.stdout


@pytest.mark.parametrize("words", [["ps", "--json", "--home", "~nobody-here/x"], ["ps", "--json"]])
def test_a_home_that_is_nobodys_is_told(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have neither HOME nor a passwd entry: the error must say so, without a traceback."""
    monkeypatch.setenv("GPURUN_HOME", "~nobody-here/gpurun")
    shown = CliRunner().invoke(build_app(), words, standalone_mode=False)
    answer = json.loads(shown.stdout)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (4, "home.unknown")


UNNAMED = [["logs"], ["attach"], ["receipt"], ["report"], ["sample", "--prompt", "x"]]


@pytest.mark.parametrize("words", UNNAMED, ids=lambda words: words[0])
def test_a_verb_that_looks_or_continues_takes_the_usual_run(
    words: list[str], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurun.cli.viewer.follow_run", lambda *_, **__: Result())
    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", lambda *_: None)
    none = json.loads(gpurun(*words, "--json").stdout)
    assert (none["exit_code"], none["errors"][0]["code"]) == (2, "run.none")
    for name, begun_wall in (("fox-41", 1e9), ("owl-7", 5e8)):
        run = opened_run(Home(own_home), name)
        run.clock.jump_wall(begun_wall - run.clock.wall())
        run.write(run.opened())
    assert any(line.startswith("fox-41, ") for line in gpurun(*words).stderr.splitlines())
    run = opened_run(Home(own_home), "ant-3")
    run.clock.jump_wall(6e8 - run.clock.wall())
    monkeypatch.setattr("gpurun.core.paths.RunFolder.is_closed", property(lambda folder: folder.name != "ant-3"))
    run.write(run.opened())
    assert any(line.startswith("ant-3, ") for line in gpurun(*words).stderr.splitlines())


def test_resume_takes_the_one_undriven_run_and_never_guesses(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name, `resume` must take the only run that no process drives, and not the last run."""
    monkeypatch.setattr("gpurun.cli.viewer.follow_run", lambda *_, **__: Result())
    started = list[str]()
    monkeypatch.setattr("gpurun.lifecycle.supervisor.start_supervisor", lambda folder, *_: started.append(folder.name))
    finished_run(Home(own_home), "ape-1")
    for name in ("fox-41", "owl-7"):
        make_run(Home(own_home), name)
    with RunLock(Home(own_home).run("owl-7").lock):
        assert gpurun("resume", "--here").stderr.startswith("fox-41, ")
    assert started == ["fox-41"]
    printed = gpurun("resume").stderr
    assert lacking(printed, "fox-41, owl-7", "gpurun resume fox-41") == []


@pytest.mark.parametrize("verb", ["destroy", "stop"])
def test_a_verb_that_ends_a_machine_wants_a_name(verb: str, own_home: Path) -> None:
    make_run(Home(own_home), "fox-41")
    assert gpurun(verb).returncode == 2
    assert gpurun(verb, "").returncode == 2
    assert "run.blank" in gpurun("logs", "").stderr, "a script's variable was not set"


def test_the_common_flags_may_stand_before_the_verb(tmp_path: Path) -> None:
    there, here = str(tmp_path / "there"), str(tmp_path / "here")
    assert json.loads(gpurun("--json", "ps").stdout)["command"] == "ps"
    assert json.loads(gpurun("--json", "recipes", "list").stdout)["command"] == "recipes list"
    assert there in gpurun("--home", there, "ps").stdout
    assert here in gpurun("--home", there, "ps", "--home", here).stdout, "the nearer one"
    assert "usage.color" in gpurun("--color", "pink", "ps").stderr
    assert "--home" in gpurun("--home", "", "ps").stderr, "a script's variable was not set"
    assert json.loads(gpurun("--json", "pss").stdout)["exit_code"] == 2
