"""The state of the live view. It receives records, events and log lines, provides figures, and draws nothing.

Everything that it stores is limited, because the machine decides how much it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpurun.core.journal_events import (
    CreateIntended,
    FilesBrought,
    LegPlanned,
    RateObserved,
    ReadyObserved,
    RunClosed,
    RunOpened,
    StepFailed,
    StopRequested,
    TrainObserved,
)
from gpurun.core.money import Micros, total
from gpurun.core.records import Offer
from gpurun.core.run_plan import Lease
from gpurun.core.trainer_events import (
    AlertEvent,
    CheckpointEvent,
    EvaluationEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    TrainerEvent,
    TrialEvent,
    later_of_trial,
)
from gpurun.core.untrusted import safe_line, whole
from gpurun.view.event_text import BEGINS, ENDS, FELL, PHASES, is_alarming, tell_event, tell_rate, tell_record
from gpurun.view.number_format import format_whole
from gpurun.view.terminal_charts import Point

if TYPE_CHECKING:
    from gpurun.core.gpu_reading import GpuReading
    from gpurun.core.journal_records import Record
    from gpurun.core.run_plan import Plan
    from gpurun.core.transfer_progress import Moving

_MOST_POINTS = 4096
_MOST_LOG_LINES = 200
_MOST_TRIALS = 1000
_GPU_EVERY_S = 5.0  # The agent's own interval. The figures are read more often than they change.


@dataclass
class PhaseTime:
    """When a phase began and ended, by the journal's wall time."""

    began: float | None = None
    ended: float | None = None
    failed: bool = False

    def seconds(self, now: float) -> float | None:
        """Return how many seconds the phase took, or has taken so far; None if it has not begun."""
        return None if self.began is None else max(0.0, (self.ended if self.ended is not None else now) - self.began)


class Series:
    """Points of a curve. If there are too many, every second point is dropped, and so is every second later point."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._stride = 1
        self._offered = 0

    def add(self, x: float, y: float) -> None:
        """Add a point, unless it is one of those that are skipped to keep the curve short."""
        if self._offered % self._stride == 0:
            self.points.append((x, y))
        self._offered += 1
        if len(self.points) >= _MOST_POINTS:
            self.points = self.points[::2]
            self._stride *= 2


class Screen:
    """What is known about one run, which the live view shows."""

    def __init__(self, plan: Plan, spent_by: Callable[[Sequence[Record], float], Micros]) -> None:
        """Begin with a plan. `spent_by` is the ledger's function for the cost of a journal's records up to a time."""
        self.plan, self.terms = plan, plan.job.terms
        self.phases = {name: PhaseTime() for name in PHASES}
        self.phase = "plan"
        self.leg, self.spent_before = "", Micros(0)
        self.opened_wall: float | None = None
        self.closed_wall: float | None = None
        self.exit_code: int | None = None
        self.stopping = False
        self.story = ""
        self.alarm = ""
        self.moving: Moving | None = None
        self.heard_wall: float | None = None
        self.deadline_wall: float | None = None
        self.queued: Lease | None = None
        """The lease of a job that may still be in a queue. The lease begins when the job starts."""
        self.pace, self.is_too_slow = "", False
        self.start: StartEvent | None = None
        self.step: StepEvent | None = None
        self.evaluation: EvaluationEvent | None = None
        self.checkpoint: CheckpointEvent | None = None
        self.trials: dict[int, TrialEvent] = {}
        self.outcome = ""
        self.output: tuple[str, int] | None = None  # Name and bytes of the last finished output.
        self.home_step: int | None = None
        self.home_files = 0
        self.losses, self.validation = Series(), Series()
        self.speeds: deque[float] = deque(maxlen=64)
        self.gpus: GpuReading | None = None
        self.gpu_use: deque[float] = deque(maxlen=64)
        self._gpu_due_wall = 0.0
        self.log: deque[str] = deque(maxlen=_MOST_LOG_LINES)
        self._records: list[Record] = []
        self._spent_by = spent_by

    def update(
        self,
        records: Iterable[Record],
        events: Iterable[TrainerEvent],
        log_lines: Iterable[bytes | str],
        moving: Moving | None = None,
        heard_wall: float | None = None,
        gpus: GpuReading | None = None,
    ) -> None:
        """Add the new input, the current transfer and GPU figures, and the time of the machine's last reply."""
        self.moving, self.heard_wall = moving, heard_wall
        self.gpus = gpus
        if gpus is not None and gpus.use_percent is not None and gpus.wall >= self._gpu_due_wall:
            self._gpu_due_wall = gpus.wall + _GPU_EVERY_S
            self.gpu_use.append(float(gpus.use_percent))
        for record in records:
            self._records.append(record)
            self._apply_record(record)
            self.story = tell_record(record, self.terms)
            if is_alarming(record) and str(record.event) != "rate.observed":  # A measured rate has its own line.
                self.alarm = self.story
        for event in events:
            self._apply_event(event)
        self.log.extend(shown for entry in log_lines if (shown := safe_line(entry)))

    @property
    def steps(self) -> int | None:
        """Return the number of steps that the job announced, or else the plan's; None if neither is known."""
        announced = (self.start.steps if self.start is not None else None) or (self.step.steps if self.step else None)
        return announced or self.plan.job.steps or None

    def silent_s(self, now: float) -> float | None:
        """Return the seconds since the last output of a running trainer; None if no trainer should be running."""
        if self.phase != "run" or self.phases["run"].ended or self.heard_wall is None:
            return None
        return max(0.0, now - self.heard_wall)

    def eta_s(self) -> float | None:
        """Return the seconds of training that are left at the latest speed; None if they are not known."""
        last, steps = self.step, self.steps
        if last is None or last.step is None or last.step_s is None or steps is None:
            return None
        if self.phase != "run" or self.stopping or self.phases["run"].ended:
            return None
        return max(0.0, last.step_s * (steps - last.step))

    def spent(self, now: float) -> Micros:
        """Return the cost of the rentals up to `now`, as the ledger computes it."""
        return self._spent_by(self._records, now)

    def at_end(self, now: float) -> Micros | None:
        """Return the expected cost at the end of training, at most the worst case; None while it is not known."""
        eta = self.eta_s()
        return None if eta is None else min(self.spent(now + eta), self.worst_micros)

    @property
    def is_waiting(self) -> bool:
        """Return whether nothing is rented now, and the run waits for its next machine."""
        return self.moving is not None and self.moving.what == "wait" and self.closed_wall is None

    @property
    def worst_micros(self) -> Micros:
        """Return the most that the run can cost: the worst case of this machine, plus the cost of earlier machines."""
        return total(self.spent_before, self.plan.worst_micros)

    def _switch_offer(self, intent: CreateIntended) -> None:
        """Switch to the approved offer that is requested now, because the offers before it were not available."""
        taken = next(
            (candidate for candidate in self.plan.approved if candidate.offer.model_dump(mode="json") == intent.offer),
            None,
        )
        # On a later leg, price, lease and worst case are this leg's, even if the first plan has the offer too.
        if self.leg:
            offer, worst = Offer.model_validate(intent.offer), Micros(intent.worst_micros)
            leased = {"offer": offer, "lease": Lease(**intent.lease.model_dump()), "worst_micros": worst}
            taken = (taken or self.plan.chosen).model_copy(update=leased)
        if taken is not None:
            self.plan = self.plan.with_chosen(taken)

    def _apply_record(self, record: Record) -> None:
        name, wall = str(record.event), record.wall
        if name in BEGINS:
            self.phase = BEGINS[name]
            self.phases[self.phase].began = self.phases[self.phase].began or wall
        if name in ENDS:
            phase = self.phases[ENDS[name]]
            phase.began, phase.ended = phase.began or wall, wall
        match record.typed:
            case RunOpened():
                self.opened_wall = self.opened_wall or wall
            case CreateIntended() as intent:
                self._switch_offer(intent)
                self.deadline_wall = float(intent.deadline_wall)
                self.queued = intent.lease if intent.lease.queue_s else None
            case ReadyObserved(instance=machine) if self.queued is not None and machine is not None:
                if machine.started_wall is not None and self.deadline_wall is not None:
                    self.deadline_wall = self.queued.ends_wall(self.deadline_wall, machine.started_wall)
                    self.queued = None
            case LegPlanned() as leg:
                self.spent_before = Micros(leg.spent_micros)
                # Until the next create request states its worst case, the cap limits it.
                if leg.left_micros is not None:
                    chosen = self.plan.chosen.model_copy(update={"worst_micros": Micros(leg.left_micros)})
                    self.plan = self.plan.with_chosen(chosen)
                self.leg = f"leg {leg.number}" + (f" from step {format_whole(leg.step)}" if leg.step else "")
                self.phases |= {name: PhaseTime() for name in PHASES[1:]}
                self.phase, self.deadline_wall, self.alarm, self.outcome = "plan", None, "", ""
            case RateObserved() as rate:
                self.pace = f"at step {rate.step}: {tell_rate(rate, self.terms)}"
                self.is_too_slow = not rate.finishes
            case TrainObserved(outcome=outcome):
                self.outcome = outcome
                self.phases["run"].failed = outcome in FELL
            case FilesBrought() as brought:
                self.home_step = _newest_whole(brought, self.terms.whole)
                self.home_files = len(brought.files)
            case StopRequested():
                self.stopping = True
            case StepFailed():
                self.phases[self.phase].failed = True
                self.phases[self.phase].ended = wall
            case RunClosed(exit_code=exit_code):
                self.closed_wall = wall
                self.exit_code = int(exit_code)

    def _apply_event(self, event: TrainerEvent) -> None:
        match event:
            case StartEvent():
                self.start = event
            case StepEvent(step=int(step)):
                self.step = event
                self._add_point(self.losses, step, event.loss)
                if event.tokens_per_s is not None:
                    self.speeds.append(event.tokens_per_s)
            case EvaluationEvent():
                self.evaluation = event
                if event.step is not None:
                    self._add_point(self.validation, event.step, event.val_loss)
            case CheckpointEvent(step=int()):
                self.checkpoint = event
            case TrialEvent(trial=int(number)) if number in self.trials or len(self.trials) < _MOST_TRIALS:
                self.trials[number] = later_of_trial(self.trials.get(number), event)
            case AlertEvent():
                self.alarm = tell_event(event)
            case StopEvent() if event.reason not in ("done", "signal"):
                self.alarm = tell_event(event)
            case TrainerEvent(kind="output"):
                self.output = safe_line(str(event.said.get("name", "a file"))), whole(event.said.get("bytes")) or 0

    def _add_point(self, series: Series, step: int, value: float | None) -> None:
        if value is not None:
            series.add(float(step), value)

    def checkpoint_wall(self) -> float:
        """Return when the last checkpoint was written; 0.0 if the machine does not report it."""
        return (self.checkpoint.wall if self.checkpoint is not None else None) or 0.0


def _newest_whole(downloaded: FilesBrought, whole_kinds: frozenset[str]) -> int | None:
    """Return the newest step of which all checkpoint files were downloaded and verified; None if there is none."""
    kinds: dict[int, set[str]] = {}
    for file in downloaded.files:
        kinds.setdefault(file["step"], set()).add(file["kind"])
    return max((step for step, found in kinds.items() if found >= whole_kinds), default=None)
