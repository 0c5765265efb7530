"""After the first steps the lease and the cap are held against the measured rate; neither is ever lengthened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.paths import Home
from gpurun.core.progress import Event
from gpurun.view.story import is_alarming, tell_record
from tests.lifecycle.scripted_cloud import LEASE, World
from tests.lifecycle.test_faults import kept


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def let_it_say(world: World, *, step_s: float, steps: int = 1000) -> None:
    """A trainer that takes so long a step, and is watched while it takes them."""
    resolved = {
        **world.plan.resolved,
        "train": {"steps": steps, "batch_tokens": 8192, "checkpoint_every": 1000},
        "eval": {"every": 1000, "tokens": 8192},
    }
    world.plan = world.plan.model_copy(update={"resolved": resolved})
    world.folder.plan.write_text(world.plan.to_json())
    before = world.far._events

    def events() -> list[dict[str, Any]]:
        start, *end = before()
        gone_s = world.clock.monotonic() - world.far.started_s
        taken = [n for n in (1, *range(10, steps, 10)) if n * step_s <= gone_s]
        lines = [{"kind": "step", "step": n, "elapsed_s": n * step_s, "memory_peak_bytes": 9 << 30} for n in taken]
        return [start, *lines, *end]

    world.far._events = events  # type: ignore[method-assign]


def test_a_rate_that_is_quick_enough_is_told_once_with_the_end_and_the_dollars(world: World) -> None:
    let_it_say(world, step_s=0.01)
    assert world.drive() is ExitCode.DONE
    told = world.all_of(Event.RATE_OBSERVED)
    assert len(told) == 1
    assert (told[0]["finishes"], told[0]["ends_at_step"], told[0]["needed_micros"]) == (True, 1000, None)
    assert told[0]["tokens_per_s"] == pytest.approx(819_200)
    assert 0 < told[0]["expected_micros"] < world.plan.cap_micros
    record = next(one for one in world.records if one.event is Event.RATE_OBSERVED)
    words = tell_record(record)
    assert words.startswith("measured 819 k tok/s: ends in ")
    assert words.endswith(" in all; the cap of $" + f"{world.plan.cap_micros / 1e6:.2f} holds")
    assert not is_alarming(record)
    assert kept(world)


def test_a_rate_that_is_too_slow_says_how_far_it_gets_and_what_would_finish_and_spends_no_more(world: World) -> None:
    let_it_say(world, step_s=0.4)
    world.far.train_s = 10_000.0
    code = world.drive()
    told = world.all_of(Event.RATE_OBSERVED)
    assert len(told) == 1
    assert told[0]["finishes"] is False
    assert 60 <= told[0]["ends_at_step"] < 1000
    assert told[0]["needed_micros"] > world.plan.cap_micros
    record = next(one for one in world.records if one.event is Event.RATE_OBSERVED)
    assert "too slow to finish: it ends at step" in tell_record(record)
    assert "under a cap of $" in tell_record(record)
    assert is_alarming(record)
    assert code is not ExitCode.DONE
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s, "the lease is not lengthened"
    assert kept(world)


def test_a_supervisor_that_is_started_again_tells_it_from_what_came_before(world: World) -> None:
    let_it_say(world, step_s=0.01)
    world.folder.events.write_text("")
    killed: list[bool] = []

    def kill_once() -> None:
        if not killed and world.folder.events.stat().st_size > 4000:
            killed.append(True)
            raise KeyboardInterrupt

    world.far.during = kill_once
    with pytest.raises(KeyboardInterrupt):
        world.drive()
    world.drive()
    assert len(world.all_of(Event.RATE_OBSERVED)) == 1
