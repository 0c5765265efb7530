"""The only way to try again: after growing, randomised pauses, until there has been no progress for a while."""

from __future__ import annotations

from collections.abc import Callable
from random import random
from typing import TypeVar

from gpurun.core.clock import Clock

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Retry:
    """The pauses between the attempts at one thing, by a clock that may be a virtual one.

    The first pause is `first_s`, and each further one is twice as long, up to `longest_s`; without that, all are equal.
    A random share of up to `jitter` is added to each. Pauses stop before `limit_s` is over, counted from the first
    attempt or from the last call of `moved`, and after `tries` further attempts.
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
        """Record progress: the limits and the pauses begin again."""
        self._begun_mono, self._pause_s, self._tries_left = self._clock.monotonic(), self._first_s, self._tries

    def pauses(self, *, at_least_s: float = 0.0, most_s: float = float("inf")) -> bool:
        """Pause before one more attempt, within these bounds; return False at once if none is left."""
        pause_s = max(at_least_s, min(most_s, self._pause_s)) * (1.0 + self._jitter * random())
        if self._tries_left < 1 or self._clock.monotonic() - self._begun_mono + pause_s > self._limit_s:
            return False
        self._tries_left, self._pause_s = self._tries_left - 1, min(self._longest_s, 2 * self._pause_s)
        self._clock.sleep(pause_s)
        return True

    def wait(self, error: Exception, *, at_least_s: float = 0.0, most_s: float = float("inf")) -> None:
        """Pause after a failed attempt; raise its error if no attempt is left."""
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
        """Return the result of the attempt; it is repeated after a `passing` error.

        `before` is called before each attempt and `failed` after each failed one; an exception from either ends the
        loop.
        """
        while True:
            before()
            try:
                return attempt()
            except passing as error:
                failed(error)
                self.wait(error)
