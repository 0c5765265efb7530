"""Tests of `gpurun recipes check`: it plans and really rehearses every recipe, and leaves no file of that behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gpurun.cli import recipe_checks
from gpurun.cli.commands.recipes import check
from gpurun.cli.session import Session
from gpurun.core.clock import Clock, SystemClock
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.paths import Home, RunFolder
from gpurun.core.stop_request import read_stop_request
from gpurun.view.check_table import CheckRow
from tests.lifecycle.tiny_runs import drive, make_run

RECIPE = """
about = "a test"
model = {{ layers = 1, heads = 1, width = 32, context = 32 }}
data = {{ source = "stdlib", tokenizer = "char", limit_mb = 1 }}
optim = {{ lr = {lr} }}
schedule = {{ kind = "constant" }}
train = {{ steps = 8, batch_tokens = 512, micro_batch = 16, checkpoint_every = 4, log_every = 1 }}
eval = {{ every = 8, tokens = 512 }}
sample = {{ prompts = ["def "], tokens = 8 }}
hardware = {{ gpu = "1xA100", disk_gb = 20, on_cpu = "rehearsal" }}
"""


def recipe(folder: Path, name: str, lr: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(lr=lr))
    return str(path)


def left_in(home: Home) -> list[str]:
    """Return what a check has left in the home, except for the cache of tokenised text."""
    return sorted(path.name for path in home.root.iterdir() if path.name not in ("cache", "runs")) + home.run_names()


@pytest.mark.slow
def test_a_recipe_that_learns_passes_and_another_fails_alone(own: Home, tmp_path: Path) -> None:
    """A recipe whose loss rises must fail without failing the others. Supervisor, agent and trainer are real here."""
    good, bad = recipe(tmp_path, "good", "0.003"), recipe(tmp_path, "bad", "50.0")
    result = check(Session(home=own, quiet=True), [good, "no-such-recipe", bad])
    first, unknown, last = result.data["recipes"]
    assert first["ok"]
    assert first["first_loss"] > first["last_loss"]
    assert first["planned_micros"] > 0
    assert first["planned_s"] > 0
    assert "smoke" in first["verdict"]
    assert (unknown["ok"], last["ok"]) == (False, False)
    assert [error.code for error in result.errors][:1] == ["recipe.unknown"]
    assert len(result.errors) == 2
    assert (result.exit_code, left_in(own)) == (ExitCode.USAGE, [])
    assert "✔" in result.text
    assert "✘" in result.text


def test_a_rehearsal_that_breaks_is_reported_with_its_reason(
    own: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny trainer replaces the real one here, because it can be made to fail at a given step."""

    def supervise(folder: RunFolder, home: Home, clock: Clock) -> None:
        plan = json.loads(folder.plan.read_text())
        plan["resolved"]["train"]["fail_at"] = 3
        folder.plan.write_text(json.dumps(plan))
        drive(home, folder.name)

    monkeypatch.setattr(recipe_checks, "start_supervisor", supervise)
    result = check(Session(home=own, quiet=True), [recipe(tmp_path, "mine", "0.003")])
    assert [error.code for error in result.errors] == ["recipes.rehearsal_failed"]
    assert "mine" in result.errors[0].what
    assert result.exit_code == ExitCode.TRAINING_FAILED
    assert left_in(own) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_interrupted_ends_its_rehearsal_first(
    own: Home, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Otherwise the rehearsal's trainer would continue in a folder that the check is about to remove."""
    folder = make_run(own)
    monkeypatch.setattr(recipe_checks, "start_supervisor", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        recipe_checks._rehearse(own, folder, SystemClock())
    wanted = read_stop_request(folder)
    assert wanted is not None
    assert wanted.how == "destroy"


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (CheckRow("a", planned_micros=None, first_loss=4.0, last_loss=3.0), "recipes.no_offer"),
        (CheckRow("a", planned_micros=1, first_loss=4.0, last_loss=4.0), "recipes.learned_nothing"),
        (CheckRow("a", planned_micros=1, first_loss=4.0, last_loss=float("nan")), "recipes.learned_nothing"),
        (CheckRow("a", planned_micros=1, first_loss=4.0, last_loss=None), "recipes.learned_nothing"),
    ],
)
def test_a_recipe_out_of_reach_or_that_learns_nothing_fails(row: CheckRow, code: str) -> None:
    with pytest.raises(GpurunError) as refused:
        recipe_checks.judge_recipe(row, row.recipe)
    assert refused.value.code == code
