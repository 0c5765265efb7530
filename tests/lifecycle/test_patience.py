"""Tests that a closed lid or a dead line costs time but no result, and that a hung machine is not paid for forever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import utc
from gpurun.core.errors import ExitCode, TrainingFailed
from gpurun.core.journal_records import Event
from gpurun.core.money import format_rate
from gpurun.core.paths import Home
from gpurun.core.records import Address, Instance
from gpurun.core.run_plan import Lease
from gpurun.lifecycle.connect import LEAST_UNHEARD_S, Patience
from gpurun.providers.base import Unknown
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.view.event_text import HEARD, SILENT
from tests.lifecycle.faults import kept
from tests.lifecycle.scripted_cloud import World
from tests.refusals import lacking

# The lease allows a minute each for the upload and the download, and ten hours for the training.
LONG = Lease(boot_s=120, ship_s=60, train_s=36_000, collect_s=60, destroy_s=60, kill_allowance_s=60)
TRAINS_S = 300.0
NO_ROUTE = MachineLost("no route to host")
KILLED = FarRefusal("broken", "The agent ended with 137: it said nothing")


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(Home(tmp_path), LONG)
    made.far.train_s = TRAINS_S
    return made


def dead_for(world: World, verb: str, seconds: float) -> list[float]:
    """Make the calls of a verb fail for `seconds` from its first call on; return a list of the times of these calls."""
    real, calls = getattr(world.far, verb), list[float]()

    def down(*arguments: Any, **options: Any) -> Any:
        calls.append(world.clock.monotonic())
        if calls[-1] - calls[0] < seconds:
            world.clock.sleep(5.0)
            raise NO_ROUTE
        return real(*arguments, **options)

    setattr(world.far, verb, down)
    return calls


def doze_in(world: World, verb: str, seconds: float) -> None:
    """Let the laptop sleep for `seconds` during the first call of a verb. When it wakes, the connection is dead."""
    real, slept = getattr(world.far, verb), list[float]()

    def dozing(*arguments: Any, **options: Any) -> Any:
        if not slept:
            slept.append(seconds)
            world.clock.sleep(seconds)
            raise MachineLost("The connection is dead: not a byte for 60 s.")
        return real(*arguments, **options)

    setattr(world.far, verb, dozing)


@pytest.mark.parametrize("verb", ["manifest", "fetch"])
@pytest.mark.parametrize("happens", [dead_for, doze_in])
def test_two_minutes_without_a_line_in_collect_lose_nothing(
    world: World, verb: str, happens: Callable[[World, str, float], Any]
) -> None:
    happens(world, verb, 120.0)
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert (world.cloud.boxes[0].died_s or 0) < TRAINS_S + 600, "and no minute more than that is paid"
    assert kept(world)


def test_a_night_with_the_lid_closed_in_collect_loses_nothing(world: World) -> None:
    """The laptop sleeps for eight hours during the download.

    gpurun must not take that for a machine that is unreachable.
    """
    doze_in(world, "fetch", 8 * 3600.0)
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


@pytest.mark.parametrize("verb", ["unpack", "start"])
@pytest.mark.parametrize("happens", [dead_for, doze_in])
def test_minutes_offline_before_training_are_taken_from_it(
    world: World, verb: str, happens: Callable[[World, str, float], Any]
) -> None:
    happens(world, verb, 300.0)
    assert world.drive() is ExitCode.DONE
    assert world.state.outcome == "done"
    assert kept(world)


def test_a_line_too_slow_to_send_is_given_up_at_the_limit(world: World) -> None:
    def slow(*_: object, on_progress: Callable[[int], None], timeout_s: float, **__: object) -> None:
        end_mono, sent_bytes = world.clock.monotonic() + timeout_s, 0
        while world.clock.monotonic() < end_mono:
            world.clock.sleep(5.0)
            sent_bytes += 1
            on_progress(sent_bytes)
        raise MachineLost("There was no time left to send the rest.")

    world.far.unpack = slow  # type: ignore[method-assign,assignment]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert (world.cloud.boxes[0].died_s or 0) < LONG.ship_s + 300
    assert kept(world)


def test_a_machine_that_dies_while_collecting_is_not_waited_for(world: World) -> None:
    def taken_away(*_: object, **__: object) -> None:
        world.cloud.boxes[0].died_s = world.cloud.boxes[0].died_s or world.cloud.now
        raise NO_ROUTE

    world.far.fetch = taken_away  # type: ignore[method-assign,assignment]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert world.clock.monotonic() < TRAINS_S + 600
    assert kept(world)


def test_an_unreachable_machine_is_paid_just_as_long_again(world: World) -> None:
    """gpurun waits for an unreachable machine for as long as training the result again would take, and no longer."""
    world.far.broken["manifest"] = NO_ROUTE
    world.far.train_s = trains_s = 1800.0
    assert world.drive() is ExitCode.TRAINING_FAILED
    died_s = world.cloud.boxes[0].died_s or 0
    assert 2 * trains_s < died_s < 2 * trains_s + 600 < LONG.total_s / 4
    assert kept(world)


def test_a_machine_silent_at_its_new_address_is_given_up_early(world: World) -> None:
    """A restarted pod has another port.

    If nothing answers there either, gpurun must give the pod up, long before the lease ends.
    """
    read, calls = world.cloud.read, dead_for(world, "poll", float("inf"))

    def restarted(instance_id: str) -> Instance:
        moved = {"address": Address(kind="folder", folder="another")} if calls else {}
        return read(instance_id).model_copy(update=moved)

    world.cloud.read = restarted  # type: ignore[method-assign]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert (world.cloud.boxes[0].died_s or 0) < LONG.ship_s + 300
    assert kept(world)


def test_without_any_network_giving_up_would_save_nothing(world: World) -> None:
    """The whole network is down for four hours.

    gpurun could not end the machine either, so it must wait for the results.
    """
    calls = dead_for(world, "fetch", 4 * 3600.0)
    read = world.cloud.read

    def unheard(instance_id: str) -> Any:
        if calls and calls[-1] - calls[0] < 4 * 3600.0:
            world.clock.sleep(30.0)
            raise Unknown("no network")
        return read(instance_id)

    world.cloud.read = unheard  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


def test_what_the_bucket_has_is_waited_for_a_quarter_hour(world: World) -> None:
    world.cloud.killing = "before far.manifest"
    assert world.drive() == "killed"
    pushed = world.state.model_copy(update={"pushed": "runs/fox-41"})
    begun_mono = world.clock.monotonic()

    def unreachable() -> None:
        raise NO_ROUTE

    with pytest.raises(TrainingFailed, match="no route"):
        Patience(pushed, world.context).until_done(unreachable)
    assert LEAST_UNHEARD_S < world.clock.monotonic() - begun_mono < LEAST_UNHEARD_S + 60
    assert world.drive() is ExitCode.DONE


@pytest.mark.parametrize("verb", ["unpack", "start", "manifest", "get checkpoints/000030.model.safetensors"])
def test_an_agent_that_was_killed_a_few_times_is_asked_again(world: World, verb: str) -> None:
    """A machine that is short of memory may kill the agent's process a few times: gpurun must repeat the call."""
    world.far.broken, world.far.broken_times = {verb: KILLED}, {verb: 5}
    assert world.drive() is ExitCode.DONE
    assert len(world.at_home) == 3
    assert kept(world)


def test_an_agent_killed_every_time_is_left_within_minutes(world: World) -> None:
    world.far.broken["manifest"] = KILLED
    assert world.drive() is ExitCode.COLLECT_FAILED
    held = next(record for record in world.records if record.event is Event.HOLD_INTENDED)
    assert held.wall - world.records[0].wall < TRAINS_S + 300
    assert not world.all_of(Event.COLLECT_OBSERVED)
    assert kept(world)


# A machine that trains and is silent


def silences(world: World) -> list[tuple[str, str]]:
    return [(data["code"], data["message"]) for data in world.all_of(Event.INCIDENT) if data["code"] in (SILENT, HEARD)]


def test_a_silent_machine_is_reported_once_with_time_and_cost(
    world: World,
) -> None:
    dead_for(world, "poll", 600.0)
    assert world.drive() is ExitCode.DONE
    (silent, message), (heard, again) = silences(world)
    assert (silent, heard) == (SILENT, HEARD)
    assert utc(world.clock.wall())[11:13] in message
    assert lacking(message, world.cloud.name, format_rate(world.plan.offer.rate_micros_per_hour)) == []
    assert message.endswith("no route to host")
    assert any(f"10 m {s:02} s" in again for s in (3, 4)), "its last try may have been at 10 m"


def test_a_minutes_cut_and_a_closed_lid_do_not_count_as_silence(world: World) -> None:
    doze_in(world, "poll", 3600.0)
    assert world.drive() is ExitCode.DONE
    assert silences(world) == []


def test_a_silent_machine_is_given_up_after_the_users_limit(
    world: World,
) -> None:
    """After `--give-up-after`, gpurun ends a silent machine: otherwise a sleeping user pays for ten hours of lease."""
    choices = world.plan.choices.model_copy(update={"give_up_after_s": 1800})
    world.folder.plan.write_text(world.plan.model_copy(update={"choices": choices}).to_json())
    dead = [dead_for(world, verb, 1e9) for verb in ("poll", "manifest")]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert 1800 < world.clock.monotonic() - dead[0][0] < 1800 + 300
    assert len(dead[1]) == 1, "the user's limit holds for what is left to collect, too"
    assert "--give-up-after" in world.all_of(Event.TRAIN_OBSERVED)[-1]["message"]
    assert kept(world)


def test_where_nobody_is_reached_from_here_nothing_is_given_up(world: World) -> None:
    choices = world.plan.choices.model_copy(update={"give_up_after_s": 600})
    world.folder.plan.write_text(world.plan.model_copy(update={"choices": choices}).to_json())
    real, poll = world.cloud.read, dead_for(world, "poll", 3000.0)

    def read(instance_id: str) -> Instance:
        if poll and world.clock.monotonic() - poll[0] < 3000.0:
            raise Unknown("no route to host")
        return real(instance_id)

    world.cloud.read = read  # type: ignore[method-assign]
    assert world.drive() is ExitCode.DONE
    assert "offline" in silences(world)[0][1]
