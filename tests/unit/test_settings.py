"""Tests of a user's defaults: each is used, and the error about a wrong one names the place where it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.cli.result import Result
from gpurun.core.paths import Home
from tests.lifecycle.tiny_runs import make_run
from tests.refusals import lacking

Gpurun = Callable[..., tuple[int, str]]


@pytest.fixture
def gpurun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gpurun:
    """Return a function that runs a command line in a fresh work folder, and returns exit code and standard output."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("gpurun.planning.place.ready_providers", lambda home: [])

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpurun", *words])
        code = run_app(build_app())
        return code, capsys.readouterr().out

    return run


def first_error(said: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(said)["errors"][0]
    return error


@pytest.mark.parametrize("by", ["environment", "project file", "user file"])
def test_colour_follows_the_flag_and_then_the_settings(
    by: str, gpurun: Gpurun, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Home(own_home).prepare()
    if by == "environment":
        monkeypatch.setenv("GPURUN_COLOR", "always")
    else:
        place = Path("gpurun.toml") if by == "project file" else own_home / "config.toml"
        place.write_text("\ufeff" + 'color = "always"\n')  # Notepad puts this mark first.
    assert "\x1b[" in gpurun("config", "show")[1]
    assert "\x1b[" not in gpurun("config", "show", "--color", "never")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in gpurun("config", "show")[1]


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("max_cost = -3", ("max_cost", "'-3'", "positive")),
        ('max_cost = "lots"', ("max_cost", "'lots'")),
        ('max_cost = "25_00"', ("max_cost", "'25_00'")),
        ('color = "pink"', ("color", "'pink'")),
        ('uplink = "fast"', ("uplink", "'fast'")),
        ("uplink = nan", ("uplink", "Mbit/s from 0.1 to 100000")),
        ("uplink = 0", ("uplink", "Mbit/s from 0.1 to 100000")),
        ('on_interrupt = "wait"', ("on_interrupt", "'wait'")),
        ("recipe" + ".a" * 4000 + " = 1", ("TOML", "nested")),
        ("recipe = " + "[" * 4000, ("TOML", "nested")),
    ],
)
def test_a_wrong_setting_is_blamed_on_its_file_and_not_on_a_flag(
    line: str, facts: tuple[str, ...], gpurun: Gpurun, own_home: Path
) -> None:
    Home(own_home).prepare().config.write_text(line + "\n")
    code, said = gpurun("plan", "mini-gpt", "--json")
    assert code == 2
    assert lacking(first_error(said)["message"], "config.toml", *facts) == []
    assert "--" not in first_error(said)["message"] + first_error(said)["hint"]


@pytest.mark.parametrize(
    ("own", "of_project", "cap", "place"),
    [
        ("25", "90000", 25_000_000, "user file config.toml"),
        ("25", "24.5", 24_500_000, "project file gpurun.toml"),
        ("", "90000", None, ""),  # A folder from another person must not set what may be spent.
    ],
)
def test_a_cloned_repository_may_only_lower_the_cap(
    own: str, of_project: str, cap: int | None, place: str, gpurun: Gpurun, own_home: Path
) -> None:
    Path("gpurun.toml").write_text(f"max_cost = {of_project}\n")
    if own:
        Home(own_home).prepare().config.write_text(f"max_cost = {own}\n")
    data = json.loads(gpurun("plan", "mini-gpt", "--gpu", "1xH100", "--json")[1])["data"]
    assert (data["cap_micros"], data["cap_from"]) == (cap, place)
    if cap:
        assert f"cap ${cap / 1e6:.2f} ({place})" in " ".join(gpurun("plan", "mini-gpt", "--gpu", "1xH100")[1].split())


@pytest.mark.parametrize("line", ['providers = "aws"', 'on_interrupt = "detach"', "uplink = 48"])
def test_a_project_file_sets_nothing_else(line: str, gpurun: Gpurun, own_home: Path) -> None:
    Path("gpurun.toml").write_text(line)
    code, said = gpurun("plan", "mini-gpt", "--json")
    assert (code, first_error(said)["code"]) == (2, "config.not_for_a_project")
    assert line.partition(" ")[0] in first_error(said)["message"]
    assert str(own_home / "config.toml") in first_error(said)["hint"]


def test_providers_may_be_parted_by_commas_and_spaces(gpurun: Gpurun, own_home: Path) -> None:
    Home(own_home).prepare().config.write_text('providers = "runpod, aws"\n')
    code, said = gpurun("plan", "mini-gpt", "--gpu", "1xH100", "--max-cost", "25", "--json")
    assert {one["offer"]["provider"] for one in json.loads(said)["data"]["candidates"]} <= {"runpod", "aws"}
    assert code == 0


@pytest.mark.parametrize("by", ["environment", "user file"])
def test_the_uplink_that_is_set_is_what_a_plan_counts_with(
    by: str, gpurun: Gpurun, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Home(own_home).prepare()
    if by == "environment":
        monkeypatch.setenv("GPURUN_UPLINK", "187.5")
    else:
        (own_home / "config.toml").write_text("uplink = 187.5\n")
    code, said = gpurun("plan", "gpt2-124m", "--gpu", "8xA100", "--max-cost", "25", "--json")
    assert code == 0
    assert json.loads(said)["data"]["uplink"] == {"bits_per_s": 187.5e6, "basis": "as configured"}


@pytest.mark.parametrize("words", [["config", "show"], ["plan", "mini-gpt"], ["train", "mini-gpt"], ["offers"]])
def test_a_folder_named_like_the_file_is_a_setup_error(words: list[str], gpurun: Gpurun) -> None:
    Path("gpurun.toml").mkdir()
    code, said = gpurun(*words, "--json")
    assert (code, first_error(said)["code"]) == (4, "config.unreadable")
    assert str(Path("gpurun.toml").absolute()) in first_error(said)["message"]


@pytest.mark.parametrize("words", [["config", "show"], ["plan", "mini-gpt"], ["train", "mini-gpt"], ["offers"]])
def test_a_home_that_is_a_file_is_told_as_a_matter_of_the_setup(
    words: list[str], gpurun: Gpurun, own_home: Path
) -> None:
    own_home.write_text("")
    code, said = gpurun(*words, "--json")
    assert code == 4
    assert str(own_home) in first_error(said)["message"]


def test_a_machine_can_be_ended_whatever_the_settings_are(
    gpurun: Gpurun, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(Home(own_home))
    monkeypatch.setattr("gpurun.cli.run_control.stop_run", lambda *given, **named: Result(text="ended"))
    Path("gpurun.toml").write_text("color = [")
    assert gpurun("destroy", "fox-41", "--yes") == (0, "ended\n")
