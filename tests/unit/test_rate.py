"""Tests of the remaining time, estimated from fifty real steps; evaluations and checkpoints are counted apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.trainer_events import TrainerEvent, make_event
from gpurun.jobs.training.estimate import LAUNCH_S, Pieces
from gpurun.jobs.training.throughput import MeasuredSpeed, Meter

RESOLVED = {
    "train": {"steps": 400, "batch_tokens": 1000, "checkpoint_every": 100},
    "eval": {"every": 40, "tokens": 3000},
}


def training(
    *, step_s: float, eval_s: float, save_s: float, start_s: float = 7.0, log_every: int = 10
) -> Iterator[Any]:
    """Yield the events of a run whose steps, evaluations and checkpoints take these times."""
    pieces = Pieces.from_recipe(RESOLVED)
    assert pieces is not None
    elapsed_s = start_s
    yield {"kind": "start", "elapsed_s": 1.0}
    for step in range(1, pieces.steps + 1):
        elapsed_s += step_s
        last = step == pieces.steps
        if step == 1 or last or step % log_every == 0:
            yield {"kind": "step", "step": step, "elapsed_s": elapsed_s, "memory_peak_bytes": 5}
        if last or step % 40 == 0 or step % 100 == 0:
            elapsed_s += eval_s
            yield {"kind": "eval", "step": step, "elapsed_s": elapsed_s, "eval_s": eval_s}
        if last or step % 100 == 0:
            elapsed_s += save_s
            yield {"kind": "checkpoint", "step": step, "elapsed_s": elapsed_s}
    yield {"kind": "stop", "elapsed_s": elapsed_s}


def read(fields: dict[str, Any]) -> TrainerEvent:
    event = make_event(fields)
    assert event is not None
    return event


def first(events: list[Any], resolved: dict[str, Any] = RESOLVED) -> MeasuredSpeed:
    meter = Meter(resolved)
    return next(found for event in events if (found := meter.take(read(event))) is not None)


def test_the_end_is_told_from_fifty_steps() -> None:
    events = list(training(step_s=0.5, eval_s=4.0, save_s=0.0))
    found = first(events)
    assert (found.step, found.steps, found.memory_peak_bytes) == (60, 400, 5)
    assert found.step_s == pytest.approx(0.5)
    assert found.tokens_per_s == pytest.approx(2000)
    assert found.elapsed_s + found.left_s == pytest.approx(events[-1]["elapsed_s"])


@pytest.mark.parametrize("slow", [range(20), range(31, 40)], ids=["they warm up", "the machine was busy for once"])
def test_a_few_slow_steps_do_not_slow_the_rest(slow: range) -> None:
    def late(event: dict[str, Any]) -> dict[str, Any]:
        """Return the event as if each step in `slow` had taken half a second longer."""
        return {**event, "elapsed_s": event["elapsed_s"] + 0.5 * len([n for n in slow if n < event.get("step", 400)])}

    events = [late(event) for event in training(step_s=0.5, eval_s=4.0, save_s=0.0)]
    found = first(events)
    assert found.step_s == pytest.approx(0.5)
    assert found.elapsed_s + found.left_s == pytest.approx(events[-1]["elapsed_s"])


@pytest.mark.parametrize("log_every", [1, 3, 10])
def test_periodic_work_is_in_the_pace_however_often_a_line_comes(log_every: int) -> None:
    def stalled(event: dict[str, Any]) -> dict[str, Any]:
        """Return the event as if every fifth step had waited 1.5 s for data; most single steps show no wait."""
        return {**event, "elapsed_s": event["elapsed_s"] + 1.5 * (event.get("step", 400) // 5)}

    events = [stalled(event) for event in training(step_s=0.5, eval_s=4.0, save_s=0.0, log_every=log_every)]
    found = first(events)
    assert found.step_s == pytest.approx(0.8, rel=0.05)
    assert found.elapsed_s + found.left_s == pytest.approx(events[-1]["elapsed_s"], rel=0.05)


def test_an_unseen_evaluation_counts_as_a_forward_of_its_tokens() -> None:
    seldom = {**RESOLVED, "eval": {"every": 100, "tokens": 3000}}
    found = first([one for one in training(step_s=0.5, eval_s=0.5, save_s=0.0) if one["kind"] != "eval"], seldom)
    assert found.left_s - 340 * found.step_s == pytest.approx(4 * 1.0 * found.step_s)


def test_an_unseen_hellaswag_counts_as_a_forward_of_its_rows() -> None:
    resolved = {**RESOLVED, "eval": {**RESOLVED["eval"], "hellaswag_items": 100}}
    plain, more = (Pieces.from_recipe(recipe) for recipe in (RESOLVED, resolved))
    assert plain is not None
    assert more is not None
    assert more.eval_tokens - plain.eval_tokens == 100 * 4 * 128


SAMPLED = {**RESOLVED, "sample": {"prompts": ["a", "b"], "tokens": 100}, "model": {"context": 50, "layers": 6}}
SAMPLED_TOKENS = 2 * 100 * 50  # A whole context for each token of each prompt.
# Both prompts run in one batch, token after token.
LAUNCHING_S = 100 * 6 * sum(LAUNCH_S) / 2 / 3


def test_unseen_samples_go_at_the_pace_of_a_seen_evaluation() -> None:
    plain, more = (first(list(training(step_s=0.5, eval_s=0.9, save_s=0.0)), one) for one in (RESOLVED, SAMPLED))
    assert more.left_s - plain.left_s == pytest.approx(4 * (SAMPLED_TOKENS * 0.9 / 3000 + LAUNCHING_S))


def test_before_an_evaluation_samples_count_as_single_forwards() -> None:
    steps = [one for one in training(step_s=0.5, eval_s=0.0, save_s=0.0) if one["kind"] != "eval"]
    plain, more = (first(steps, one) for one in (RESOLVED, SAMPLED))
    assert more.left_s - plain.left_s == pytest.approx(4 * (SAMPLED_TOKENS / 2 / 1000 * 0.5 + LAUNCHING_S))


def test_checkpoints_that_were_seen_are_counted_for_the_rest() -> None:
    events = list(training(step_s=0.5, eval_s=2.0, save_s=9.0, log_every=50))
    late = [event for event in events if not (event["kind"] == "step" and 1 < event["step"] < 150)]
    found = first(late)
    # After step 1 the next line is that of step 150, so the only stretch contains three evaluations and a checkpoint.
    assert found.step == 150
    assert found.elapsed_s + found.left_s == pytest.approx(events[-1]["elapsed_s"], rel=0.05)


def test_a_trainer_that_began_again_is_measured_anew() -> None:
    slow, quick = (list(training(step_s=each, eval_s=1.0, save_s=0.0)) for each in (5.0, 0.1))
    assert first(slow[:5] + quick).step_s == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [1, 30, 50])
def test_a_run_that_is_over_by_then_is_not_told(steps: int) -> None:
    meter = Meter({**RESOLVED, "train": {**RESOLVED["train"], "steps": steps}})
    assert not [event for event in training(step_s=1, eval_s=1, save_s=0) if meter.take(read(event))]


values = st.sampled_from(
    [None, True, "", "9", -1, 0, 1, 51, 99, 400, 401, 2**70, 0.5, 1e300, float("nan"), float("inf"), []]
)
lies = st.fixed_dictionaries({}, optional=dict.fromkeys(("step", "elapsed_s", "eval_s", "memory_peak_bytes"), values))
kinds = st.sampled_from(["start", "step", "eval", "sample", "checkpoint", "stop"])


@given(st.lists(st.tuples(kinds, lies), max_size=12))
def test_whatever_a_machine_says_figures_are_sane_or_absent(events: list[tuple[str, dict[str, Any]]]) -> None:
    meter = Meter(RESOLVED)
    for kind, values in events:
        found = meter.take(read({"kind": kind, **values}))
        if found is not None:
            assert 0 < found.step_s < 1e10
            assert 0 <= found.left_s < 1e13
            assert 50 <= found.step - 1 < 400


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 200), st.integers(1, 200))
def test_what_is_due_is_counted_as_the_trainer_does(every: int, saved: int, steps: int, step: int) -> None:
    pieces, step = Pieces(steps, 1, every, 1, saved), min(step, steps)
    due = [n for n in range(step, steps + 1) if n == steps or n % saved == 0]
    assert pieces.saves_from(step) == len(due)
    due = [n for n in range(step, steps + 1) if n == steps or n % saved == 0 or n % every == 0]
    assert pieces.evaluations_from(step) == len(due)
