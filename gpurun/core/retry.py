"""Retries with growing, randomised pauses and limits. No other module of gpurun has a retry loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from random import random
from typing import TypeVar

from gpurun.core.clock import Clock

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Retry:
    """The pauses between the attempts at one task.

    The first pause is `first_s` long. Each further pause is twice as long as the one before, up to `longest_s`; without
    `longest_s`, all are equal. A random share of up to `jitter` is added to each. No attempt is left if the next pause
    would end more than `limit_s` after the start, or after `tries` retries; `moved` begins both counts again.
    """

    def __init__(
        self,
        clock: Clock,
        first_s: float,
        *,
        longest_s: float = 0.0,
        limit_s: float = float("inf"),
        tries: float = float("inf"),
        jitter: float = 0.0,
    ) -> None:
        self._clock, self._first_s, self._longest_s = clock, first_s, max(first_s, longest_s)
        self._limit_s, self._tries, self._jitter = limit_s, tries, jitter
        self.moved()

    @property
    def pause_s(self) -> float:
        """Return how long the next pause is, without jitter."""
        return self._pause_s

    def moved(self) -> None:
        """Record progress: both limits are counted from now, and the next pause is the first one again."""
        self._begun_mono, self._pause_s, self._tries_left = self._clock.monotonic(), self._first_s, self._tries

    def pauses(self, *, at_least_s: float = 0.0, most_s: float = float("inf")) -> bool:
        """Pause before the next attempt, within these bounds; return False without a pause if no attempt is left."""
        pause_s = max(at_least_s, min(most_s, self._pause_s)) * (1.0 + self._jitter * random())
        if self._tries_left < 1 or self._clock.monotonic() - self._begun_mono + pause_s > self._limit_s:
            return False
        self._tries_left, self._pause_s = self._tries_left - 1, min(self._longest_s, 2 * self._pause_s)
        self._clock.sleep(pause_s)
        return True

    def wait(self, error: Exception, *, at_least_s: float = 0.0, most_s: float = float("inf")) -> None:
        """Pause after a failed attempt; if no attempt is left, raise its `error` instead."""
        if not self.pauses(at_least_s=at_least_s, most_s=most_s):
            raise error

    def until_done(
        self,
        attempt: Callable[[], T],
        passing: type[E] | tuple[type[E], ...],
        *,
        before: Callable[[], object] = lambda: None,
        failed: Callable[[E], object] = lambda _: None,
    ) -> T:
        """Call `attempt` until it succeeds, and return its result. Only errors of a `passing` class are retried.

        `before` is called before each attempt, and `failed` with the error after each failed one; an exception from
        either ends the loop. If no attempt is left, the last error is raised.
        """
        while True:
            before()
            try:
                return attempt()
            except passing as error:
                failed(error)
                self.wait(error)
