"""Tests of the retry schedule, in virtual time."""

from __future__ import annotations

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.retry import Retry


def tries_of(retry: Retry, clock: VirtualClock, count: int = 99) -> list[float]:
    """Return the times of the tries, in seconds of the clock."""
    made = [clock.monotonic()]
    while len(made) < count and retry.pauses():
        made.append(clock.monotonic())
    return made


def test_pauses_grow_to_the_longest_and_restart_with_progress() -> None:
    clock = VirtualClock()
    retry = Retry(clock, 1.0, longest_s=4.0)
    assert tries_of(retry, clock, 6) == [0, 1, 3, 7, 11, 15]
    retry.moved()
    assert retry.pause_s == 1.0


def test_the_last_try_is_at_the_limit_at_the_latest() -> None:
    clock = VirtualClock()
    assert tries_of(Retry(clock, 2.0, limit_s=6.0), clock) == [0, 2, 4, 6]
    assert tries_of(Retry(clock, 2.0, tries=1), clock) == [6, 8]


def test_what_is_asked_for_is_waited_for_within_the_time_left() -> None:
    clock = VirtualClock()
    assert Retry(clock, 1.0).pauses(at_least_s=17.0)
    assert clock.monotonic() == 17.0
    assert Retry(clock, 10.0).pauses(most_s=3.0)
    assert clock.monotonic() == 20.0
    assert not Retry(clock, 1.0, limit_s=10.0).pauses(at_least_s=11.0), "it is given up at once"
    assert clock.monotonic() == 20.0


def test_chance_makes_a_pause_longer_by_a_share() -> None:
    clock = VirtualClock()
    assert Retry(clock, 4.0, jitter=0.25).pauses()
    assert 4.0 <= clock.monotonic() <= 5.0


def test_an_answer_ends_the_tries_and_the_limit_raises_the_error() -> None:
    clock, seen = VirtualClock(), list[Exception]()

    def attempt() -> str:
        if clock.monotonic() < 4:
            raise OSError(clock.monotonic())
        return "done"

    assert Retry(clock, 2.0).until_done(attempt, OSError, failed=seen.append) == "done"
    assert [error.args[0] for error in seen] == [0, 2]
    clock = VirtualClock()
    with pytest.raises(OSError, match=r"2\.0"):
        Retry(clock, 2.0, limit_s=3.0).until_done(attempt, OSError)
