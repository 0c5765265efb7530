"""Output without a terminal: one line per event, UTC times, no carriage returns or escapes, a heartbeat each minute.

Metrics are reduced to one line per `metric_period_s`. Other output of the machine is limited to a certain rate, and the
newest is preferred, so that a flood of warnings cannot fill a CI log. Journal records are always shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from heapq import merge
from operator import itemgetter
from typing import TYPE_CHECKING

from gpurun.core.clock import utc
from gpurun.core.job_terms import TRAINER, JobTerms
from gpurun.core.journal_events import Incident
from gpurun.core.trainer_events import StartEvent, StepEvent, StopEvent, TrainerEvent, TrialEvent
from gpurun.view.event_text import BEGINS, ENDS, GOES_ON, HEARD, SILENT, is_alarming, tell_event, tell_record
from gpurun.view.number_format import format_duration
from gpurun.view.progress_line import moving_words
from gpurun.view.style import Style
from gpurun.view.styled_text import line, render

if TYPE_CHECKING:
    from gpurun.core.journal_records import Record
    from gpurun.core.transfer_progress import Moving

_BURST = 40
_LINES_PER_S = 1.0
# The start and end of training are always shown, unless there is a flood of them.
_ALWAYS = (StartEvent, StopEvent)
# A transfer that is shorter than this is reported only when it ends.
_WORTH_S = 5.0


class PlainView:
    """Turns new records and events into lines; the caller prints them to standard error."""

    def __init__(
        self,
        terms: JobTerms = TRAINER,
        *,
        unicode: bool = True,
        metric_period_s: float = 30.0,
        heartbeat_s: float = 60.0,
    ) -> None:
        self._terms, self._style = terms, Style(unicode=unicode)
        self._metric_period_s = metric_period_s
        self._heartbeat_s = heartbeat_s
        self._steps: int | None = None
        self._phase, self._silence = "plan", ""
        self._held: TrainerEvent | None = None
        self._metric_wall = self._moving_wall = float("-inf")
        self._boot_words = ""
        self._line_wall: float | None = None
        self._allowance = float(_BURST)
        self._allowance_wall: float | None = None
        self._left_out = self._to_skip = 0

    def update(
        self, records: Iterable[Record], events: Iterable[TrainerEvent], now: float, moving: Moving | None = None
    ) -> list[str]:
        """Return the lines to print for new records and events, in time order, and for the current transfer."""
        lines: list[str] = []
        self._refill_allowance(now)
        events = [event for event in events if not (isinstance(event, TrialEvent) and event.is_under_way)]
        others = sum(not isinstance(event, (StepEvent, *_ALWAYS)) for event in events)
        self._to_skip = max(0, others - max(0, int(self._allowance)))
        from_records = ((record.wall, partial(self._record_lines, record)) for record in records)
        from_events = ((_wall_of_event(event, now), partial(self._event_lines, event, now)) for event in events)
        for _, tell in merge(from_records, from_events, key=itemgetter(0)):
            lines += tell()
        lines += self._release_if_due(now)
        if moving is not None and moving.seconds >= _WORTH_S and self._is_due(moving, now):
            lines.append(self._stamp_line(now, self._phase, moving_words(moving)))
            self._moving_wall, self._boot_words = now, moving.words
        if self._allowance >= 1:
            lines += self._report_left_out(now)
        if lines or self._line_wall is None or now < self._line_wall:
            self._line_wall = now
        elif now - self._line_wall >= self._heartbeat_s:
            words = f"still working; nothing new for {format_duration(now - self._line_wall)}"
            lines.append(
                self._stamp_line(now, self._phase, f"still no answer: {self._silence}" if self._silence else words)
            )
            self._line_wall = now
        return lines

    def _is_due(self, moving: Moving, now: float) -> bool:
        """Return whether to show a transfer again: time has passed, or the expected machine's status has changed."""
        is_news = moving.what == "boot" and moving.words != self._boot_words
        return is_news or abs(now - self._moving_wall) >= self._metric_period_s

    def rest(self, now: float) -> list[str]:
        """Return the lines to print when the output ends: the last step, and how many lines were left out."""
        return [*self._release_step(now), *self._report_left_out(now)]

    def _record_lines(self, record: Record) -> list[str]:
        name = str(record.event)
        self._phase = BEGINS.get(name) or GOES_ON.get(name) or ENDS.get(name) or self._phase
        code = record.typed.code if isinstance(record.typed, Incident) else ""
        if code in (SILENT, HEARD) or name == "train.observed":
            self._silence = tell_record(record, self._terms) if code == SILENT else ""
        mark = "! " if is_alarming(record) else ""
        return [self._stamp_line(record.wall, self._phase, f"{mark}{tell_record(record, self._terms)}")]

    def _event_lines(self, event: TrainerEvent, now: float) -> list[str]:
        """Keep the latest step for `_release_if_due`.

        Show it before a stop event, so that the last figures are not lost.
        """
        if isinstance(event, StepEvent):
            self._held = event
            return []
        if isinstance(event, StartEvent):
            self._steps = event.steps
        lines: list[str] = []
        if isinstance(event, StopEvent):
            lines += self._release_step(now)
        is_always = isinstance(event, _ALWAYS)
        if self._allowance <= -_BURST if is_always else self._to_skip:
            self._to_skip -= not is_always
            self._left_out += 1
            return lines
        self._allowance -= 1
        wall = _wall_of_event(event, now)
        return [*lines, *self._report_left_out(wall), self._stamp_line(wall, "run", tell_event(event, self._steps))]

    def _report_left_out(self, wall: float) -> list[str]:
        """Report once how many lines were left out since the last line."""
        count, self._left_out = self._left_out, 0
        return [self._stamp_line(wall, "run", f"{count} lines of {self._terms.worker} left out")] if count else []

    def _release_if_due(self, now: float) -> list[str]:
        due = now - self._metric_wall >= self._metric_period_s or now < self._metric_wall
        return self._release_step(now) if due else []

    def _release_step(self, now: float) -> list[str]:
        if self._held is None:
            return []
        event, self._held, self._metric_wall = self._held, None, now
        return [self._stamp_line(_wall_of_event(event, now), "run", tell_event(event, self._steps))]

    def _refill_allowance(self, now: float) -> None:
        since = now - self._allowance_wall if self._allowance_wall is not None else 0.0
        self._allowance = min(float(_BURST), self._allowance + max(0.0, since) * _LINES_PER_S)
        self._allowance_wall = now

    def _stamp_line(self, wall: float, phase: str, text: str) -> str:
        stamp = utc(wall)[:19] + "Z"
        return render([line(f"{stamp}  {phase:<9}  {text}")], self._style)


def _wall_of_event(event: TrainerEvent, otherwise: float) -> float:
    return event.wall if event.wall is not None else otherwise
