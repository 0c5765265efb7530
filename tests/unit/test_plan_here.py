"""Plans that this machine alone has to say something to: what a CPU does with a recipe, what planning leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.core.clock import SystemClock
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.model import GpuNeed
from gpurun.core.paths import Home
from gpurun.core.plan import Plan, Request
from gpurun.lifecycle.plan import make_plan
from gpurun.lifecycle.quotes import renting
from gpurun.lifecycle.quotes.market import Market


def planned_here(tmp_path: Path, *overrides: str) -> Plan:
    request = Request(recipe="mini-gpt", providers=("local",), overrides=("data.limit_mb=1", *overrides))
    home = Home(tmp_path).prepare()
    return make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=False)


def test_what_set_says_of_a_machine_without_cuda_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.lifecycle.plan._has_cuda", lambda: False)
    assert planned_here(tmp_path).form == "rehearsal"
    assert planned_here(tmp_path, "hardware.on_cpu=as_written").form == "full"
    with pytest.raises(GpurunError, match="has no CUDA device"):
        planned_here(tmp_path, "hardware.on_cpu=refuse")


def test_a_plan_leaves_no_shards_behind_but_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    done = CliRunner().invoke(build_app("plan"), ["plan", "mini-gpt", "--dry-run", "--set", "data.limit_mb=1"])
    assert done.exit_code == 0
    assert list((tmp_path / "cache" / "shards").iterdir())
    assert not list((tmp_path / "cache" / "staged").glob("*"))


def test_where_no_cloud_could_be_asked_that_is_not_called_a_want_of_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(need: GpuNeed, *_: object) -> Market:
        return Market((), (("runpod", "runpod gave no whole answer: Name or service not known"),), 0.0, ("runpod",))

    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_x")
    monkeypatch.setattr(renting, "live_offers", silent)
    request = Request(recipe="mini-gpt", providers=("runpod",), max_cost_micros=1_000_000)
    home = Home(tmp_path).prepare()
    with pytest.raises(SetupError, match="No cloud could be asked") as refused:
        make_plan(request, run="fox-41", home=home, clock=SystemClock(), say=print, need_data=True)
    assert refused.value.code == "market.unreachable"
