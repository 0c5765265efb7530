"""Tests that the measured training rate is compared with the lease and the cap, and lengthens neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, cost_of, format_usd
from gpurun.core.paths import Home
from gpurun.core.trainer_events import EventLines
from gpurun.jobs.training.history import Priors, load_priors
from gpurun.lifecycle.steps.watch_training import Rating
from gpurun.planning.history_file import add_prior
from gpurun.remote.archive import Pack
from gpurun.remote.messages import Shipped
from gpurun.view.event_text import is_alarming, tell_record
from gpurun.view.number_format import format_whole
from tests.changed_plan import changed_plan
from tests.lifecycle.faults import kept
from tests.lifecycle.scripted_cloud import LEASE, RATE, World
from tests.refusals import lacking


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Home(tmp_path))


def let_it_say(world: World, *, step_s: float, steps: int = 1000) -> None:
    """Make the trainer take `step_s` seconds for each step, and report the first and every tenth step."""
    resolved = {
        **world.plan.job.resolved,
        "model": {"layers": 2, "heads": 2, "width": 64, "context": 64},
        "train": {
            "micro_batch": 1,
            "steps": steps,
            "batch_tokens": 8192,
            "checkpoint_every": 1000,
            "compile": False,
            "loop": "own",
        },
        "eval": {"every": 1000, "tokens": 8192},
    }
    offer = world.plan.offer.model_copy(update={"vram_gb": 16})
    changes = {"resolved": resolved, "offer": offer, "cap_micros": world.plan.worst_micros}
    world.plan = changed_plan(world.plan, changes)
    world.folder.plan.write_text(world.plan.to_json())
    before = world.far._events

    def events() -> list[dict[str, Any]]:
        start, *end = before()
        gone_s = world.clock.monotonic() - world.far.started_s
        taken = [n for n in (1, *range(10, steps, 10)) if n * step_s <= gone_s]
        lines = [{"kind": "step", "step": n, "elapsed_s": n * step_s, "memory_peak_bytes": 9 << 30} for n in taken]
        start |= {"micro_batch": 64, "precision": "bf16", "torch": "2.9.1"}
        evaluation = {"kind": "eval", "step": 60, "elapsed_s": 60 * step_s, "eval_s": 0.0, "val_loss": 2.5}
        return [start, *lines, *([evaluation] if len(taken) > 7 else []), *end]

    world.far._events = events  # type: ignore[method-assign]


def test_a_rate_that_suffices_is_shown_once_with_end_and_dollars(world: World) -> None:
    let_it_say(world, step_s=0.01)
    assert world.drive() is ExitCode.DONE
    rates = world.all_of(Event.RATE_OBSERVED)
    assert len(rates) == 1
    assert (rates[0]["finishes"], rates[0]["ends_at_step"], rates[0]["needed_micros"]) == (True, 1000, None)
    assert rates[0]["tokens_per_s"] == pytest.approx(819_200)
    assert 0 < rates[0]["expected_micros"] < world.plan.cap_micros
    record = next(record for record in world.records if record.event is Event.RATE_OBSERVED)
    assert lacking(tell_record(record), "819 k tok/s", format_usd(world.plan.worst_micros)) == []
    assert not is_alarming(record)
    assert kept(world)


@pytest.mark.parametrize("set_back_s", [0.0, 3600.0])
def test_a_clock_that_is_set_back_makes_no_run_cheaper(world: World, set_back_s: float) -> None:
    let_it_say(world, step_s=0.01)
    world.far.during = lambda: world.clock.jump_wall(-set_back_s if world.far.polls == 1 else 0.0)
    world.drive()
    (observed,) = world.all_of(Event.RATE_OBSERVED)
    created_s, observed_s = (
        next(record.mono for record in world.records if record.event is event)
        for event in (Event.CREATE_INTENDED, Event.RATE_OBSERVED)
    )
    assert observed["expected_micros"] > cost_of(RATE, observed_s - created_s + observed["left_s"])


def test_a_rate_too_slow_says_how_far_and_what_would_finish(world: World) -> None:
    let_it_say(world, step_s=0.6)
    world.far.train_s = 10_000.0
    code = world.drive()
    rates = world.all_of(Event.RATE_OBSERVED)
    assert len(rates) == 1
    assert rates[0]["finishes"] is False
    assert 60 <= rates[0]["ends_at_step"] < 1000
    assert rates[0]["needed_micros"] > world.plan.cap_micros
    record = next(record for record in world.records if record.event is Event.RATE_OBSERVED)
    needed = format_usd(Micros(rates[0]["needed_micros"]))
    ends, steps = format_whole(rates[0]["ends_at_step"]), format_whole(1000)
    assert lacking(tell_record(record), f"{ends} of {steps}", needed) == []
    assert is_alarming(record)
    assert code is not ExitCode.DONE
    assert (world.cloud.boxes[0].died_s or 0) <= LEASE.total_s, "the lease is not lengthened"
    assert kept(world)


def test_a_restarted_supervisor_finds_the_rate_in_earlier_events(world: World) -> None:
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


def test_after_a_sleep_the_latest_line_counts_for_the_rate(world: World) -> None:
    let_it_say(world, step_s=0.1)
    rating = Rating(world.state, world.context)
    lines = [{"kind": "step", "step": n, "elapsed_s": n * 0.1} for n in (1, *range(10, 501, 10))]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    pieces = EventLines()
    rating.hear(pieces.take(content[:700]))
    rating.hear(pieces.take(content[700:]))
    (rate,) = rating.notes(world.state)
    assert (rate.step, rate.step_s) == (500, pytest.approx(0.1))
    assert not list(rating.notes(world.state))


def test_a_trained_run_informs_later_plans_once_if_settled_twice(world: World) -> None:
    let_it_say(world, step_s=0.01)
    world.home.priors.write_bytes(b"half a fi")
    world.drive()
    known, damage = load_priors(world.home)
    assert (len(known.runs), damage) == (1, "")
    past = known.runs[0]
    assert (past.run, past.card, past.gpu_count, past.micro_batch, past.torch) == ("fox-41", "A100", 1, 64, "2.9.1")
    assert (past.machine, past.memory_peak_bytes, past.val_losses) == ("", 9 << 30, ((60, 2.5),))
    assert past.tokens_per_s == pytest.approx(819_200, rel=0.01)
    context = world.context
    add_prior(world.state, context.plan, context.folder, context.home, context.clock.wall())
    assert len(load_priors(world.home)[0].runs) == 1
    assert world.home.priors.with_suffix(".damaged").read_bytes() == b"half a fi", "it is set aside, not lost"


@pytest.mark.parametrize(
    ("provider", "stage", "is_kept"), [("runpod", "", True), ("ssh", "", False), ("runpod", "s3://b/p", False)]
)
def test_a_measured_upload_informs_later_plans_about_the_line(
    world: World, provider: str, stage: str, is_kept: bool
) -> None:
    let_it_say(world, step_s=0.01)
    unpack = world.far.unpack

    def send(pack: Pack, **options: Any) -> Shipped:
        pack.sent_bytes = 30_000_000
        world.clock.sleep(7.0)
        return unpack(pack, **options)

    world.far.unpack = send  # type: ignore[method-assign,assignment]
    world.drive()
    plan, context = world.context.plan, world.context
    offer = plan.offer.model_copy(update={"provider": provider})
    rented = changed_plan(plan, {"offer": offer, "choices": plan.choices.model_copy(update={"stage": stage})})
    add_prior(world.state, rented, context.folder, context.home, context.clock.wall())
    (prior,) = load_priors(world.home)[0].runs
    assert prior.sent_bytes == (30_000_000 if is_kept else 0)
    assert prior.sent_s == pytest.approx(7.0 if is_kept else 0.0, abs=1.0)


def test_a_run_that_failed_shows_nothing(world: World) -> None:
    let_it_say(world, step_s=0.01)
    ended = world.far._events
    world.far._events = lambda: [  # type: ignore[method-assign]
        event if event["kind"] != "stop" else {**event, "reason": "nonfinite"} for event in ended()
    ]
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert load_priors(world.home) == (Priors(), "")


@pytest.mark.parametrize("lie", [{"device": "cpu"}, {"micro_batch": "64"}, {"torch": 2}, {"precision": "x" * 300}])
def test_an_impossible_figure_from_a_machine_is_not_kept(world: World, lie: dict[str, Any]) -> None:
    let_it_say(world, step_s=0.01)
    before = world.far._events
    world.far._events = lambda: [{**event, **lie} for event in before()]  # type: ignore[method-assign]
    world.drive()
    assert load_priors(world.home)[0] == Priors()


def test_a_speed_that_no_such_card_has_is_not_kept(world: World) -> None:
    let_it_say(world, step_s=0.01)
    card = world.plan.offer.model_copy(update={"gpu": "T4"})
    world.plan = changed_plan(world.plan, {"offer": card})
    world.folder.plan.write_text(world.plan.to_json())
    before = world.far._events
    world.far._events = lambda: [  # type: ignore[method-assign]
        {**event, "elapsed_s": event["elapsed_s"] * 1e-7} if event["kind"] == "step" else event for event in before()
    ]
    world.drive()
    assert load_priors(world.home)[0] == Priors()


def test_a_disk_that_does_not_take_it_ends_no_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpurun.planning.history_file.write_atomic", full)
    let_it_say(world, step_s=0.01)
    assert world.drive() is ExitCode.DONE
