"""The one way to try again: after pauses that grow and differ by chance, until nothing has come of it for a while."""

from __future__ import annotations

from collections.abc import Callable
from random import random
from typing import TypeVar

from gpurun.core.clock import Clock

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


class Retry:
    """The pauses between the tries of one thing, by a clock that may be a virtual one.

    The first pause is `first_s`, each further one twice as long, up to `longest_s`; without that all are alike. By
    chance each is longer by a share of up to `jitter`. Pauses end before `limit_s` is over, counted from the first try
    or from the last time that something `moved`, and after so many `tries` more.
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
        """How long the next pause is, without what chance adds."""
        return self._pause_s

    def moved(self) -> None:
        """Something has come of the tries: the limits and the pauses begin again."""
        self._begun_mono, self._pause_s, self._tries_left = self._clock.monotonic(), self._first_s, self._tries

    def pauses(self, *, at_least_s: float = 0.0, most_s: float = float("inf")) -> bool:
        """Pause before one more try, within these bounds; False, at once, where none is left."""
        pause_s = max(at_least_s, min(most_s, self._pause_s)) * (1.0 + self._jitter * random())
        if self._tries_left < 1 or self._clock.monotonic() - self._begun_mono + pause_s > self._limit_s:
            return False
        self._tries_left, self._pause_s = self._tries_left - 1, min(self._longest_s, 2 * self._pause_s)
        self._clock.sleep(pause_s)
        return True

    def wait(self, error: Exception, *, at_least_s: float = 0.0, most_s: float = float("inf")) -> None:
        """Pause after a try that failed; its error is raised where none is left."""
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
        """Return what the attempt answers in the end; it is made again after a `passing` error.

        What `before` raises, which is called before each try, or `failed`, after each that failed, ends it.
        """
        while True:
            before()
            try:
                return attempt()
            except passing as error:
                failed(error)
                self.wait(error)
