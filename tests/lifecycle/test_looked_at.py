"""Tests of the check of a machine before the upload: an unsuitable machine ends, and the user learns what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.command import Command
from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.stop_request import ask_to_stop
from gpurun.core.transfer_progress import read_moving
from gpurun.jobs.command import CommandJob
from gpurun.remote.machine_facts import Exported, MachineFacts, Missing
from gpurun.view.event_text import tell_record
from gpurun.view.progress_line import moving_words
from tests.changed_plan import as_shipped
from tests.lifecycle.scripted_cloud import World
from tests.refusals import lacking


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def looks(world: World, **changes: Any) -> list[str]:
    """Make the check wait for Python and report these changed facts; return the progress lines shown meanwhile."""
    hello, shown = world.far.hello, list[str]()

    def changed_hello(python: str | None = None, on_wait: Any = None) -> MachineFacts:
        on_wait(12, "waits for ~/conda/bin/python to import torch")
        moving = read_moving(world.folder, world.clock.wall())
        assert moving is not None
        shown.append(moving_words(moving))
        return hello(python).model_copy(update=changes)

    world.far.hello = changed_hello  # type: ignore[method-assign]
    return shown


def runs_a_command(world: World, *imports: str, missing: tuple[str, ...] = ()) -> list[Any]:
    """Make the job a command whose machine lacks `missing`; return the list of (imports, PYTHONPATH) requests."""
    command = Command(argv=("train.py",), imports=imports, env={"PYTHONPATH": "src"})
    job = CommandJob(recipe="train.py", recipe_sha256="0" * 64, command=command)
    world.folder.plan.write_text(as_shipped(world.plan.model_copy(update={"job": job})).to_json())
    requests: list[Any] = []

    def answer(names: Any, python_path: str = "") -> Missing:
        requests.append((tuple(names), python_path))
        return Missing(python="/opt/conda/bin/python", missing=missing)

    world.far.missing_imports = answer  # type: ignore[method-assign]
    return requests


def test_whom_the_look_waits_for_is_shown_while_it_waits(world: World) -> None:
    shown = looks(world)
    assert world.drive() is ExitCode.DONE
    (line,) = shown
    assert lacking(line, "12 s of 3 m 00 s", "~/conda/bin/python", "torch") == []
    assert read_moving(world.folder, world.clock.wall()) is None


def test_a_stop_while_it_waits_ends_the_machine(world: World) -> None:
    looks(world)
    inner = world.far.hello

    def stopped(python: str | None = None, on_wait: Any = None) -> MachineFacts:
        ask_to_stop(world.folder, "destroy", by="user", reason="a test")
        return inner(python, on_wait=on_wait)

    world.far.hello = stopped  # type: ignore[method-assign]
    world.drive()
    assert not world.all_of(Event.READY_OBSERVED)
    assert not world.cloud.alive


def test_a_missing_module_ends_the_rental_early_and_names_pip(world: World) -> None:
    looked_for = runs_a_command(world, "torch", "mingpt", "cv2", missing=("mingpt", "cv2"))
    assert world.drive() is ExitCode.SETUP
    failure = world.state.failure
    assert failure.code == "box.no_module"
    assert "mingpt, cv2" in failure.message
    assert "--pip 'mingpt'" in failure.hint
    assert looked_for == [(("torch", "mingpt", "cv2"), "src")]
    assert not world.all_of(Event.SHIP_INTENDED)
    assert not world.cloud.alive


def test_withheld_login_variables_are_named_once_and_keys_warn(world: World) -> None:
    exported = Exported(passed=("HF_HOME",), withheld=("HF_TOKEN", "VLLM_MODE"), keys=("HTTPS_PROXY",))
    choices = world.plan.choices.model_copy(update={"pass_env": ("VLLM_*",)})
    world.folder.plan.write_text(world.plan.model_copy(update={"choices": choices}).to_json())
    looks(world, exported=exported)
    assert world.drive() is ExitCode.DONE
    (ready,) = [record for record in world.records if record.event is Event.READY_OBSERVED]
    assert ready.data["not_passed"] == ["HF_TOKEN"]
    assert lacking(tell_record(ready), "--pass-env", "HF_TOKEN") == []
    assert ready.data["facts"]["exported"] == {"passed": ["HF_HOME"]}
    (warning,) = [incident["message"] for incident in world.all_of(Event.INCIDENT) if incident["code"] == "box.warning"]
    assert "HTTPS_PROXY" in warning
    (opened,) = world.all_of(Event.RUN_OPENED)
    assert opened["pass_env"] == ["VLLM_*"]
