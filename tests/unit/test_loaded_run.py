"""Tests of past runs loaded in a notebook: their measurements as columns, and the facts of the receipt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gpurun
from gpurun.cli.app import build_app
from gpurun.core.errors import UsageError
from gpurun.core.paths import Home
from gpurun.core.secrets import child_environment
from gpurun.readers.loaded_run import COLUMNS
from tests.refusals import refusal
from tests.unit.ledger_samples import finished_run

SAID = (
    {"kind": "start", "step": 0, "tokens_per_step": 100},
    {"kind": "step", "step": 10, "elapsed_s": 3600.0, "loss": 2.5, "lr": 1e-3, "tokens": 1000},
    {"kind": "eval", "step": 10, "elapsed_s": 3601.0, "val_loss": 2.75, "bits_per_byte": 1.5},
    {"kind": "sample", "step": 10, "prompt": "a", "text": "a b"},
    {"kind": "step", "step": 20, "elapsed_s": 7200.0, "loss": float("nan")},
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home").prepare()
    folder = finished_run(home)
    folder.events.write_text("".join(json.dumps(one) + "\n" for one in SAID) + "no event\n")
    return home


def test_a_runs_figures_are_rows_by_step_with_the_spend_so_far(home: Home) -> None:
    (name,) = gpurun.runs(home.root)
    run = gpurun.load_run(home=home.root)
    first, last = run.rows
    assert (run.name, tuple(first)) == (name, COLUMNS)
    assert (first["loss"], first["val_loss"], first["bits_per_byte"], first["tokens"]) == (2.5, 2.75, 1.5, 1000)
    assert (last["step"], last["loss"], last["val_loss"]) == (20, None, None)
    assert 0 < (first["cost_usd"] or 0) < (last["cost_usd"] or 0)
    assert run.samples == ({"step": 10, "prompt": "a", "text": "a b"},)
    assert run.receipt is not None
    assert run.receipt["run"] == name
    assert list(run.metrics["step"]) == [10, 20]


def test_the_same_columns_are_scalars_for_tensorboard(home: Home, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    words = ["export", "--to", "tensorboard", str(tmp_path / "curves"), "--home", str(home.root), "--json"]
    written, again = (CliRunner().invoke(build_app(), words) for _ in range(2))
    data = json.loads(written.stdout.splitlines()[-1])["data"]
    read = EventAccumulator(data["folder"]).Reload()
    assert read.SummaryMetadata("val_loss").plugin_data.plugin_name == "scalars"
    assert [(point.step, make_ndarray(point.tensor_proto)) for point in read.Tensors("val_loss")] == [(10, 2.75)]
    assert [point.step for point in read.Tensors("cost_usd")] == [10, 20]
    assert json.loads(again.stdout.splitlines()[-1])["errors"][0]["code"] == "export.not_empty"


def test_an_unknown_run_is_refused_and_gpurun_has_no_other_names(home: Home) -> None:
    with refusal(UsageError, "run.unknown", "'owl'"):
        gpurun.load_run("owl", home.root)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = gpurun.train


def test_importing_gpurun_alone_loads_nothing_of_it() -> None:
    code = "import gpurun, sys; print([name for name in sys.modules if name.startswith('gpurun.')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child_environment()
    )
    assert done.stdout.strip() == "[]"
