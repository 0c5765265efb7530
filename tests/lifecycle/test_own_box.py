"""Tests that gpurun leaves a user's own box as it was, except that results which are not at home stay on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.errors import CollectFailed, ExitCode, GpurunError, SetupError
from gpurun.core.journal_records import Event, Phase
from gpurun.core.paths import Home
from gpurun.core.run_plan import Box
from gpurun.core.stop_request import ask_to_stop
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.ssh import HostKeyMismatch
from tests.lifecycle.scripted_cloud import LEASE, World

WEIGHTS = "checkpoints/000030.model.safetensors"


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a run on a user's box. `world.far.left` gets the `keep_results` of each call that cleans up the box."""
    world = World(Home(tmp_path))
    box = Box(target="me@lab:22", identity="/k", host_key="ssh-ed25519 AAAA", trusted="given")
    world.folder.plan.write_text(world.plan.model_copy(update={"box": box}).to_json())
    world.far.left = []  # type: ignore[attr-defined]
    world.far.farewell = lambda *, keep_results, keep_work: world.far.left.append(keep_results) or 1  # type: ignore
    return world


def incidents(world: World) -> list[str]:
    return [incident["code"] for incident in world.all_of(Event.INCIDENT)]


def test_files_left_on_the_users_box_are_reported(world: World) -> None:
    """The laptop sleeps during training and wakes an hour after the lease.

    The agent stopped the trainer when the lease ended. The run must report that the results are still on the box.
    """

    def asleep() -> None:
        if world.far.polls == 5:
            world.clock.sleep(LEASE.total_s + 3600)
            raise MachineLost("the line is dead after the sleep")

    world.far.during = asleep
    assert world.drive() is ExitCode.BUDGET_STOP
    assert world.far.left == [True]  # type: ignore[attr-defined]
    assert "box.results_left" in incidents(world)


def test_a_file_that_could_not_be_stored_here_stays_there(world: World) -> None:
    refusal = CollectFailed("collect.cannot_store", "Permission denied.", hint="Mend it.")
    world.far.broken[f"get {WEIGHTS}"] = refusal
    assert world.drive() is ExitCode.COLLECT_FAILED
    assert world.far.left == [True]  # type: ignore[attr-defined]


def test_what_cannot_be_listed_stays_there_too(world: World) -> None:
    world.far.broken["manifest"] = FarRefusal("bad_manifest", "the manifest names a file twice")
    world.drive()
    assert world.far.left == [True]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "why",
    [
        HostKeyMismatch("lab:22", "SHA256:ours", "SHA256:theirs"),
        SetupError("ssh.identity", "The key file /k cannot be read: No such file or directory.", hint="Name another."),
    ],
    ids=lambda why: why.code,
)
def test_a_reinstalled_or_keyless_box_holds_no_run_open_forever(world: World, why: GpurunError) -> None:
    """gpurun can never log in to the box again: the run must report that the box was not cleaned up, and end."""
    world.far.broken["manifest"] = why
    world.drive()
    assert world.state.phase is Phase.CLOSED
    (left,) = [incident for incident in world.all_of(Event.INCIDENT) if incident["code"] == "box.not_left"]
    assert why.what.rstrip(".") in left["message"]


def test_a_box_that_runs_nothing_is_quoted_inside_one_sentence(world: World) -> None:
    def never(**_: object) -> int:
        raise MachineLost("lab:22 runs no programs: Read-only file system.")

    world.far.farewell = never  # type: ignore[method-assign,assignment]
    world.far.broken["install_agent"] = MachineLost("lab:22 runs no programs: Read-only file system.")
    world.drive()
    (left,) = world.all_of(Event.INCIDENT)
    for said in (left["message"], world.state.failure.message):
        assert "Read-only file system" in said
        assert ".." not in said
        assert ".)" not in said


@pytest.mark.parametrize("how", ["all of it came home", "nobody wants it"])
def test_else_nothing_of_the_run_stays(world: World, how: str) -> None:
    def unwanted() -> None:
        if world.far.polls == 5:
            ask_to_stop(world.folder, "destroy", by="user", reason="user")

    if how == "nobody wants it":
        world.far.during = unwanted
    world.drive()
    assert world.far.left == [False]  # type: ignore[attr-defined]
    assert "box.results_left" not in incidents(world)
