"""Tests that a command's output names only what a command has, and nothing of gpurun's own trainer."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import lacking

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import command_samples as commands
import view_samples as samples

from gpurun.core.job_terms import COMMAND
from gpurun.core.journal_events import Event, RunOpened
from gpurun.core.paths import Home
from gpurun.core.receipt_rules import RULES
from gpurun.ledger.log_facts import NOT_DONE, SMOKE, command_verdict, verdict_of
from gpurun.ledger.spending import spent_by
from gpurun.ledger.write_receipt import read_receipt
from gpurun.view.live_layout import live_screen
from gpurun.view.live_state import Screen
from gpurun.view.plain_lines import PlainView
from gpurun.view.receipt_markdown import receipt_markdown
from gpurun.view.receipt_screen import receipt_screen
from gpurun.view.report.html_tables import differences_table, runs_table
from gpurun.view.report.report_model import (
    RunMaterial,
    arguments_of,
    find_lowest_loss,
    own_settings,
    set_differences,
    why_unranked,
)
from gpurun.view.report.series import hear
from gpurun.view.report.summary import summary
from gpurun.view.style import Style
from gpurun.view.styled_text import render
from tests.unit.ledger_samples import CloudRun, Note
from tests.whole_records import whole

STYLE = Style(width=160, height=40)
OF_A_TRAINER = ("train", "checkpoint", "recipe", "parameters", "lr —", "—  ", "None", "compile")
WAY = [
    (Event.TRAIN_INTENDED, {}),
    (Event.TRAIN_STARTED, {}),
    (Event.TRAIN_OBSERVED, {"outcome": "failed", "reason": "failed", "message": commands.WORDS}),
    (Event.COLLECT_INTENDED, {}),
]


def lines_of(*events: dict[str, Any], way: list[Note] = WAY) -> list[str]:
    """Return the lines of the plain view for a command's run, without their times and phases."""
    records = [samples.record(place, event, samples.NOW, data) for place, (event, data) in enumerate(way, 1)]
    view = PlainView(COMMAND)
    lines = view.update(records, samples.make_events(*events), samples.NOW) + view.rest(samples.NOW)
    return [line[33:] for line in lines]


def test_the_lines_of_a_command_are_in_its_words() -> None:
    events = [
        {"kind": "start", "steps": None},
        {"kind": "warning", "code": "outputs.none", "message": "no new file matches out/**"},
        {"kind": "output", "name": "a.png", "bytes": 5},
        {"kind": "step", "step": 3, "loss": 2.5, "steps": 9},
        {"kind": "stop", "reason": "failed", "message": commands.WORDS},
    ]
    lines = lines_of(*events)
    assert ["command" in line for line in lines[:3]] == [True, False, True]
    assert lacking(lines[2], "!", "failed", commands.WORDS) == []
    assert any("outputs" in line for line in lines[3:])
    assert any("outputs.none" in line and "out/**" in line for line in lines)
    assert "step 3/9  loss 2.500" in lines
    assert not [line for line in lines if any(word in line for word in OF_A_TRAINER)]


def test_a_step_without_a_loss_says_how_far_it_is_and_no_more() -> None:
    assert lines_of({"kind": "step", "step": 3, "steps": 9, "tokens_per_s": 1200.0}, way=[]) == [
        "step 3/9  1.2 k tok/s"
    ]


@pytest.mark.parametrize("files", [["checkpoint"], ["output", "output"]])
def test_what_came_home_of_a_command_is_called_here(files: list[str]) -> None:
    screen = Screen(commands.plan(), spent_by)
    events = [{"kind": "checkpoint", "step": 7, "bytes": 5}] if "checkpoint" in files else []
    home = {"files": [{"kind": kind, "step": 7} for kind in files], "missing": []}
    way = [
        (Event.COLLECT_OBSERVED, home),
        (Event.DEATH_PROVEN, {"teardown": "destroyed"}),
        (Event.RUN_CLOSED, {"exit_code": 0}),
    ]
    screen.update(
        [samples.record(i, event, samples.NOW, data) for i, (event, data) in enumerate(way)],
        samples.make_events(*events),
        (),
    )
    drawn = render(live_screen(screen, STYLE, now=samples.NOW), STYLE)
    what = "step 7" if "checkpoint" in files else "2 files"
    assert re.search(rf"{what}[^·]*here ✔", drawn)


def test_a_commands_receipt_has_its_own_words_not_derived_ones() -> None:
    receipt = commands.RECEIPT
    for text in (render(receipt_screen(receipt, STYLE, now=samples.NOW), STYLE), receipt_markdown(receipt)):
        for wanted in (
            "torchrun --nproc-per-node=1 train.py --lr 3e-4",
            "exit code 1",
            "HF",
            "870 of 900 looks",
            "OutOfMemoryError",
        ):
            assert wanted in text.replace("\\", "")
        assert "In training" not in text
        assert "compile" not in text
        assert "training" not in text.replace("outputs", "")
    assert "and 3 more" in render(receipt_screen(receipt, STYLE, now=samples.NOW), STYLE)


class CommandRun(CloudRun):
    """A run of the user's own command that has the records and the event file of a trainer's run."""

    def plan(self) -> dict[str, Any]:
        return {**super().plan(), "command": {"argv": ["train.py"], "env": {}, "secrets": []}}

    def opened(self) -> Note:
        event, data = super().opened()
        return event, {**data, "trainer": "", "command": {"argv": ["train.py"], "env": [], "secrets": []}}


def test_no_figure_is_signed_that_a_command_did_not_tell(home: Home) -> None:
    run = CommandRun(home)
    events = [{"kind": "start", "elapsed_s": 1.0}, {"kind": "warning", "code": "x", "message": "no file"}]
    events += [{"kind": "step", "step": s, "step_s": 1.0, "elapsed_s": 30.0 + s, "loss": 2.0} for s in (1, 2, 3)]
    run.folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.until_gone().settle()
    predicate = read_receipt(home, run.folder).predicate
    assert predicate["runtime"]["training"]["seconds"] is None
    assert predicate["runtime"]["phases_s"]["training"] == 3002.0
    assert predicate["training"]["warnings"]["lines"] == ["no file"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").prepare()


@pytest.mark.parametrize(
    ("outcome", "word"),
    [("done", SMOKE), ("stopped", SMOKE), ("failed", NOT_DONE), ("lost", NOT_DONE), ("none", NOT_DONE)],
)
def test_what_failed_or_never_started_is_no_smoke_test(outcome: str, word: str) -> None:
    opened = RunOpened(**whole(Event.RUN_OPENED, {"rules": RULES, "mode": "local"}))
    assert verdict_of(opened, None, "cpu", outcome)["is"] == word
    assert command_verdict(opened, None, {}, outcome)["is"] == word
    assert command_verdict(opened, None, {"looks": 9, "busy": 9, "own": 9}, outcome)["is"].startswith("gpu")


def material(name: str, *argv: str, losses: float = 2.0, **known: Any) -> RunMaterial:
    history = hear(
        [
            json.dumps({"kind": "step", "step": 1, "loss": losses}),
            json.dumps({"kind": "eval", "step": 1, "val_loss": losses}),
        ]
    )
    about = {"recipe": argv[0], "parameters": None, "resolved": {}, "terms": COMMAND, "argv": argv} if argv else {}
    about = {"recipe": "tiny", "parameters": 100, "resolved": {"data": {"limit_mb": 1, "source": "x"}}} | about
    return RunMaterial(
        run=name, form="full", mode="local", where="local cpu", state="done", shards="none", tokenizer_sha256="",
        history=history, **about | known,
    )  # fmt: skip


def test_commands_are_held_against_one_another_by_their_words() -> None:
    runs = [
        material("a", "train.py", "--lr", "1e-3", "--fast"),
        material("b", "train.py", "--lr", "3e-4", "--fast", losses=1.0),
    ]
    assert own_settings(runs) == ["--lr 1e-3", "--lr 3e-4"]
    assert set_differences(runs) == [("--lr", ["1e-3", "3e-4"])]
    assert find_lowest_loss(runs) == (runs[1], runs[1].history.best)
    again = [material("a", "train.py", "x"), material("b", "train.py", "x")]
    assert own_settings(again) == ["", ""]
    assert "the same" in differences_table(again)


def test_a_commands_arguments_are_compared_by_their_names() -> None:
    words = (
        "python",
        "train.py",
        "in.txt",
        "--lr=3e-4",
        "--wd",
        "-0.1",
        "--tag",
        "a",
        "--tag",
        "b",
        "n_layer=6",
        "--fast",
    )
    assert arguments_of(words) == {
        "word 1": "python", "word 2": "train.py", "word 3": "in.txt", "--lr": "3e-4", "--wd": "-0.1", "--tag": "a b",
        "n_layer": "6", "--fast": "yes",
    }  # fmt: skip


def test_commands_that_differ_in_a_variable_are_not_the_same() -> None:
    """A comparison must show that a variable differs, but never its values, because --env may hold a secret."""
    runs = [material(name, "t.py", env=env) for name, env in (("a", {"LR": "hunter2"}), ("b", {"LR": "3"}), ("c", {}))]
    assert set_differences(runs) == [("--env LR", ["value 1, not shown", "value 2, not shown", ""])]
    assert "hunter2" not in differences_table(runs)
    runs = [material("a", "t.py", pip=("einops",)), material("b", "t.py", pip=("einops", "wandb"))]
    assert set_differences(runs) == [("--pip", ["einops", "einops wandb"])]


def test_between_two_recipes_only_what_was_set_is_listed() -> None:
    """Two recipes differ in many settings: a row for each of them would hide the learning rate that the user set."""
    keys = {f"k{number}": number for number in range(40)}
    first, second = (
        {"model": {key: place + value for key, value in keys.items()}, "optim": {"lr": 3e-4 * place}}
        for place in (1, 2)
    )
    runs = [
        material("a", recipe="mine", resolved=first, given=("optim.lr",)),
        material("b", recipe="other", resolved=second),
    ]
    assert set_differences(runs) == [("recipe", ["mine", "other"]), ("optim.lr", ["0.0003", "0.0006"])]
    assert own_settings(runs) == ["lr 0.0003", "lr 0.0006"]
    few = [
        material("a", recipe="mine", resolved={"optim": {"lr": 1, "wd": 1}}),
        material("b", recipe="copy-of-mine", resolved={"optim": {"lr": 2, "wd": 1}}),
    ]
    assert [key for key, _ in set_differences(few)] == ["recipe", "optim.lr"], "a copy with one key changed"
    same = [run.__class__(**{**vars(run), "recipe": "mine"}) for run in runs]
    assert len(set_differences(same)) == 41, "within one recipe whatever differs was set, by --set or in its file"


def test_a_changed_trainer_is_a_difference() -> None:
    runs = [
        material("a", trainer="official trainer 0.1.0", folder_sha256="1" * 64),
        material("b", trainer="changed trainer", folder_sha256="2" * 64),
    ]
    rows = [("trainer", ["official trainer 0.1.0, sha256 1111…1111", "changed trainer, sha256 2222…2222"])]
    assert set_differences(runs) == rows


def test_a_command_is_not_held_against_a_recipe() -> None:
    runs = [material("a"), material("b", "train.py")]
    assert own_settings(runs) == ["", ""]
    assert set_differences(runs) == [("job", ["tiny", "train.py"])]
    assert why_unranked(runs)
    assert find_lowest_loss(runs) is None
    drawn = render(summary(runs, STYLE), STYLE)
    assert "limit_mb" not in drawn
    assert "JOB" in drawn


def test_a_commands_report_has_no_parameters_and_no_perplexity() -> None:
    page = runs_table([material("b", "train.py", "--lr", "1")])
    assert "parameters" not in page
    assert "perplexity" not in page
    assert "train.py --lr 1" in page
    assert material("b", "train.py").as_record()["parameters"] is None
