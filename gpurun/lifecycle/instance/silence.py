"""What is silent while a job runs: the machine, which does not answer, or the job on it, which writes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.core.clock import utc
from gpurun.core.journal_records import Event, RunState
from gpurun.core.money import format_rate
from gpurun.lifecycle.connect import LONGEST_TRY_S
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.job_spec import limits_of
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import Status
from gpurun.view.event_text import HEARD, JOB_HEARD, JOB_SILENT, SILENT
from gpurun.view.number_format import format_duration

TELL_S = 120.0
"""How long a machine is silent before an incident says so: a line that was cut is back sooner."""


class Outage:
    """For how long the machine has not answered: told once, and given up on where the user has said so.

    A time in which this laptop slept is no part of it, and one in which nobody is reached from here ends nothing.
    """

    def __init__(self, state: RunState, context: Context) -> None:
        self._state, self._context = state, context
        self._tried_mono = context.clock.monotonic()
        self._silent_s = self._counted_s = 0.0
        self._is_told = False
        self.words = ""

    @property
    def is_given_up(self) -> bool:
        """Whether it was silent for longer than the user wants to pay for, while its provider said that it runs."""
        limit_s = self._context.plan.choices.give_up_after_s
        return bool(limit_s) and self._counted_s > limit_s

    def lasts(self, lost: MachineLost, *, is_said_to_run: bool) -> Iterator[Note]:
        """Take note that it has not answered once more."""
        clock, plan = self._context.clock, self._context.plan
        gap_s = min(clock.monotonic() - self._tried_mono, LONGEST_TRY_S)
        self._tried_mono = clock.monotonic()
        self._silent_s += gap_s
        self._counted_s += gap_s if is_said_to_run else 0.0
        if self._silent_s < TELL_S:
            return
        since_wall = clock.wall() - self._silent_s
        says = "says that it runs" if is_said_to_run else "is not reached either, so this computer may be offline"
        costs = f"; it costs {format_rate(plan.offer.rate_micros_per_hour)}" if plan.offer.rate_micros_per_hour else ""
        machine = f"the machine {instance_of(self._state).id}"
        self.words = (
            f"{machine} has not answered since {utc(since_wall)[11:16]} UTC; {self._context.provider.name} {says}"
        )
        if not self._is_told:
            self._is_told = True
            message = f"{self.words}{costs}. The last try: {lost.what.rstrip('.')}"
            yield Event.INCIDENT, {"code": SILENT, "message": message, "since_wall": round(since_wall, 3)}

    def ends(self) -> Iterator[Note]:
        """Take note that it has answered."""
        if self._is_told:
            message = f"the machine answers again, after {format_duration(self._silent_s)}"
            yield Event.INCIDENT, {"code": HEARD, "message": message}
        self._tried_mono, self._silent_s, self._counted_s = self._context.clock.monotonic(), 0.0, 0.0
        self._is_told = False


class Silence:
    """Records when the agent sees that the job has written nothing for long, and when it writes again.

    What the cards show meanwhile is recorded beside it and decides nothing: a stuck collective shows 100 %.
    """

    def __init__(self, state: RunState, context: Context) -> None:
        self._context, self._ahead_s = context, state.clock_ahead_s
        self._since_wall = state.silent_since_wall
        self._longest_s = 0.0

    def hear(self, status: Status) -> Iterator[Note]:
        """Take in what the agent reports; the journal gets what has changed."""
        since_wall = status.silent_since_wall
        if status.state != "running" or (since_wall is None) == (self._since_wall is None):
            return
        if since_wall is None:
            silent_s = self._context.clock.wall() - (self._since_wall or 0.0)
            self._longest_s = max(self._longest_s, silent_s)
            message = f"the job writes again, after {format_duration(silent_s)}"
            yield Event.INCIDENT, {"code": JOB_HEARD, "message": message}
            self._since_wall = None
            return
        since_wall = round(since_wall - self._ahead_s, 3)
        # A job that writes once in a quarter of an hour is not told of each time.
        if self._context.clock.wall() - since_wall < 2 * self._longest_s:
            return
        self._since_wall = since_wall
        words = self._words(status, self._since_wall)
        yield Event.INCIDENT, {"code": JOB_SILENT, "message": words, "since_wall": self._since_wall}

    def _words(self, status: Status, since_wall: float) -> str:
        """Say since when, what the cards show, what it costs, and what ends it."""
        plan, used = self._context.plan, [card.use_percent for card in status.gpus if card.use_percent is not None]
        silent_s = max(0.0, self._context.clock.wall() - since_wall)
        since = f"since {utc(since_wall)[11:16]} UTC ({format_duration(silent_s)})"
        cards = f", while the cards show {round(sum(used) / len(used))} %" if used else ""
        rate = plan.offer.rate_micros_per_hour
        costs = f"; it costs {format_rate(rate)}" if rate else ""
        limits = limits_of(plan.choices)
        ends = [f"after {format_duration(limits['idle'])} without any work (--idle)"] if limits["idle"] else []
        ends += [f"after {format_duration(limits['silent'])} of silence (--silent)"] if limits["silent"] else []
        ended = f"it is ended {' or '.join(ends)}" if ends else "nothing but the lease ends it"
        return f"the job has written no log line and no file {since}{cards}{costs}; {ended}"
