"""What the watch hears of an agent: whether it is silent, whether it only refuses, and whether the end is near."""

from __future__ import annotations

import re

from gpurun.lifecycle.context import Context
from gpurun.machine.far import Poll

POLL_S, ENDING_POLL_S = 0.5, 0.1
LATE_SHARE = 0.1
"""Of the seconds since the last step: so late the trainer's end is seen at most, and no sooner comes the next look."""
SILENCE_S = 60.0
PAUSE_S = 30.0


class Hearing:
    """For how long nothing new was heard, and when to ask again: sooner after the last step, as idleness is paid for.

    Silence is until the agent was asked, not until its answer was read: one that has arrived while the laptop slept
    says nothing of the time that it lay here.
    """

    def __init__(self, context: Context) -> None:
        self._clock, self._beat = context.clock, 0.0
        self._asked_mono = self._beat_mono = self._clock.monotonic()
        self._refused_mono = self._refused_last_mono = float("-inf")
        last = int(context.plan.resolved["train"]["steps"])
        self._ending = re.compile(rb'"kind":"stop"|"step":%d[,}]' % last)  # All that follows the last step names it.
        self._ending_mono: float | None = None

    def ask(self) -> None:
        """Take note that the agent is asked now."""
        self._asked_mono = self._clock.monotonic()

    def is_refused_too_long(self) -> bool:
        """Whether it has answered nothing but refusals for a while, with this one: one after the other, no outage."""
        if self._asked_mono - self._refused_last_mono > PAUSE_S:
            self._refused_mono = self._asked_mono
        self._refused_last_mono = self._asked_mono
        return self._asked_mono - self._refused_mono > SILENCE_S

    def hear(self, poll: Poll) -> None:
        """Take in what it has answered."""
        self._refused_last_mono = float("-inf")
        if poll.status.wall != self._beat:
            self._beat, self._beat_mono = poll.status.wall, self._clock.monotonic()
        if self._ending_mono is None and self._ending.search(poll.chunks["events.jsonl"].data):
            self._ending_mono = self._clock.monotonic()

    def is_silent(self) -> bool:
        """Whether the heartbeat that it told last is an old one."""
        return self._asked_mono - self._beat_mono > SILENCE_S

    def pause_s(self) -> float:
        """Seconds until the next look."""
        if self._ending_mono is None:
            return POLL_S
        return min(POLL_S, max(ENDING_POLL_S, LATE_SHARE * (self._clock.monotonic() - self._ending_mono)))
