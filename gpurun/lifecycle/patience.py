"""How long a step goes on trying: unreachable is not dead, and a laptop that sleeps is not trying at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpurun.core.errors import TrainingFailed
from gpurun.core.progress import RunState
from gpurun.lifecycle.context import PASSING, RETRY_S, Context, instance_of
from gpurun.machine.base import FarRefusal, MachineLost

T = TypeVar("T")
# What the far side may refuse once and not again: its agent was killed, as for want of memory, or its disk failed.
BRIEF = frozenset({"broken", "os_error"})
MOST_REFUSALS = 20
# A stretch of so long in which nothing moves is no slow line: the line was down, or the lid closed.
AWAY_S = 30.0
# A try takes no longer than this by itself; in the rest of its time this laptop slept.
LONGEST_TRY_S = 90.0
LEAST_UNHEARD_S = 900.0


class Patience:
    """The tries of one step, repeated until one answers, the lease is over, or the instance no longer runs.

    `limit_s` is for a slow line: stretches of AWAY_S in which nothing moves do not count against it.
    """

    def __init__(self, state: RunState, context: Context, *, limit_s: float = float("inf")) -> None:
        self._state, self._context, self.limit_s = state, context, limit_s
        self._begun_mono = self._moved_mono = self._tried_mono = context.clock.monotonic()
        self._away_s = self._unheard_s = 0.0
        self._refusals = 0

    @property
    def left_s(self) -> float:
        """How long one try may take, a second at least."""
        within_s = self.limit_s + self._away_until_now_s() - (self._now_mono() - self._begun_mono)
        return max(1.0, min(within_s, self._context.seconds_left(self._state)))

    def moved(self) -> None:
        """Take note that something has come or gone."""
        self._away_s = self._away_until_now_s()
        self._moved_mono = self._tried_mono = self._now_mono()
        self._unheard_s, self._refusals = 0.0, 0

    def until_done(self, attempt: Callable[[], T]) -> T:
        """What the attempt answers in the end; it is made again as `wait` says."""
        while True:
            self._context.heed(self._state)
            try:
                answer = attempt()
            except (MachineLost, FarRefusal) as error:
                self.wait(error)
            else:
                self.moved()
                return answer

    def wait(self, error: MachineLost | FarRefusal) -> None:
        """Wait a little after a try that failed, so that the next one is worth it.

        Raises a refusal that will not pass; TrainingFailed when limit or lease is over, when the provider says that
        the instance no longer runs, and when waiting costs too much.
        """
        clock, seen_down = self._context.clock, False
        if isinstance(error, FarRefusal):
            self._refusals += 1
            if error.reason not in PASSING and (error.reason not in BRIEF or self._refusals > MOST_REFUSALS):
                raise error
        else:
            self._refusals = 0
            down = self._context.is_down(instance_of(self._state))
            if down is None:  # Nobody is reached from here, so nothing would be saved by giving up.
                self._tried_mono = clock.monotonic()
            seen_down = bool(down)
        self._unheard_s += min(clock.monotonic() - self._tried_mono, LONGEST_TRY_S)
        if seen_down or self._is_over():
            raise lost(error.what)
        self._tried_mono = clock.monotonic()
        clock.sleep(min(RETRY_S, max(0.0, self._context.seconds_left(self._state))))

    def _is_over(self) -> bool:
        slow_s = self._now_mono() - self._begun_mono - self._away_until_now_s()
        is_late = slow_s > self.limit_s or self._context.seconds_left(self._state) <= 0
        return is_late or self._unheard_s > self._most_unheard_s()

    def _most_unheard_s(self) -> float:
        """How long an instance is waited for that its provider, who is reached, says to run.

        It may be hung for good, or SSH is blocked only where this laptop is now. Waiting may cost as much again as what
        would be lost: then making it anew is cheaper. What the instance has pushed to a bucket comes from there anyhow.
        """
        if not self._context.plan.offer.rate_micros_per_hour:
            return float("inf")
        if self._state.pushed:
            return LEAST_UNHEARD_S
        paid_s = self._context.paid_s(self._state) - (self._now_mono() - self._moved_mono)
        return max(LEAST_UNHEARD_S, paid_s)

    def _away_until_now_s(self) -> float:
        gap_s = self._now_mono() - self._moved_mono
        return self._away_s + (gap_s if gap_s > AWAY_S else 0.0)

    def _now_mono(self) -> float:
        return self._context.clock.monotonic()


def lost(why: str) -> TrainingFailed:
    """The error of a step whose instance is waited for no longer."""
    return TrainingFailed(
        "machine.lost",
        f"The instance can no longer be reached: {why}",
        hint="What came home before is kept. `gpurun receipt` says what was paid.",
    )
